"""Objects of a job that were compared with nothing, in words: no check is left out in silence.

What a job keeps outside its state is fingerprinted (`seatrial.plugins.jobs.unsaved`), but not what
has no bits to read, such as a sparse tensor. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from .run import Run

UNCOMPARED = "uncompared"
"""The kind of a trace's record: ``objects`` is name -> why."""

_MOST = 3


def uncompared(run: Run) -> Iterator[str]:
    """One sentence for each reason."""
    named: dict[str, dict[str, None]] = {}
    for _, _, trace in run.traces():
        for record in trace:
            if record["kind"] == UNCOMPARED:
                for name, why in cast(dict[str, str], record["objects"]).items():
                    named.setdefault(why, {})[name] = None
    for why, names in named.items():
        said = ", ".join([*names][:_MOST])
        said += f" and {len(names) - _MOST} more" * (len(names) > _MOST)
        yield f"{said}, outside the TrainingState, was not compared with the reference: {why}"
