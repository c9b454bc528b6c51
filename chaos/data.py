"""What was done to the data in a rank's hands, and whether the rank noticed.

Guarantees: a record that a fault spoilt was refused, or is among those that the rank reports as
skipped, or it is named here. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from seatrial.recovery.errors import DamagedRecordError

from .run import Run


def refused_a_record(run: Run, attempt: int, rank: int) -> bool:
    """Whether the rank ended because a record did not have its digest."""
    errors = [each for each in run.trace(attempt, rank) if each["kind"] == "error"]
    name = DamagedRecordError.__name__
    return any(name in (each["type"], *cast(Any, each.get("causes", ()))) for each in errors)


def unnoticed_records(run: Run) -> Iterator[tuple[str, int | None]]:
    """A sentence and the step for every spoilt record that was neither refused nor skipped."""
    for attempt, rank, trace in run.traces():
        steps = {each["step"]: cast(Any, each["outputs"]) for each in trace if "outputs" in each}
        for record in (each for each in trace if each["kind"] == "spoilt"):
            step = cast(int | None, record["step"])
            # A thread that reads ahead is in no step; of a step that did not end, nothing was used.
            read_in = [each for each in steps if step in (None, each)]
            skipped = [number for each in read_in for number in steps[each].get("skipped", ())]
            if read_in and record["record"] not in skipped:
                reason = (
                    f"attempt {attempt}, step {step}: rank {rank} read record {record['record']} "
                    "with a bit flipped, and neither refused nor skipped it"
                )
                yield reason, step
