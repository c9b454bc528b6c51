"""What was done to the data in a rank's hands, and whether the rank noticed.

Guarantees: a record that a fault spoilt was refused, or is among those that the rank reports as
skipped, or was never used, as when it was read ahead; or it is named here. A reading is refused if
it never ends: `seatrial.plugins.jobs.records` announces its end only if it gave something back.
Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

from seatrial.recovery.errors import DamagedRecordError

from .events import RECORD
from .ledger import Strike
from .run import Run
from .trace import Record


def refused_a_record(run: Run, strike: Strike) -> bool:
    """Whether the rank ended because a record that the fault spoilt did not have its digest."""
    trace = run.trace(strike.attempt, strike.rank)
    mine = [r for r in trace if r["kind"] == "spoilt" and r["fault"] == strike.fault]
    spoilt = "|".join(str(each["record"]) for each in mine)
    name = DamagedRecordError.__name__
    return bool(mine) and any(
        name in (error["type"], *cast(Any, error["causes"]))
        and re.search(rf"\brecord ({spoilt}) of ", "\n".join((error["message"], *error["said"])))
        for error in cast(Any, (each for each in trace if each["kind"] == "error"))
    )


def unnoticed_records(run: Run) -> Iterator[tuple[str, int | None]]:
    """A sentence and the step for every spoilt record that was neither refused nor skipped."""
    for attempt, rank, trace in run.traces():
        is_over = run.attempts[attempt - 1].ending == "completed"
        for place, record in enumerate(trace):
            if record["kind"] == "spoilt" and _was_accepted(record, trace[place + 1 :], is_over):
                step = cast(int | None, record["step"])
                reason = (
                    f"attempt {attempt}, step {step}: rank {rank} read record {record['record']} "
                    "with a bit flipped, and neither refused nor skipped it"
                )
                yield reason, step


def _was_accepted(spoilt: Record, later: Sequence[Record], is_over: bool) -> bool:
    """Whether the rank went on with the record; ``later`` is what it did since, ``is_over`` that
    its attempt came to its end."""
    number = spoilt["record"]
    readings = [
        (place, record["edge"])
        for place, record in enumerate(later)
        if record.get("event") == RECORD and record.get("record") == number
    ]
    if not readings or readings[0][1] == "before":
        return False
    again = next((place for place, edge in readings if edge == "before"), len(later))
    for step in (each for each in later[:again] if each["kind"] == "step"):
        outputs = cast(Any, step["outputs"])
        if number in outputs["skipped"]:
            return False
        if number in (*outputs["samples"][1], *outputs["padding"]):
            return True
    # No step tells of it. A thread or process that reads ahead may have read beyond the last one.
    steps = [each["step"] for each in later if each["kind"] == "step"]
    return is_over and bool(steps) if spoilt["step"] is None else spoilt["step"] in steps
