"""What came of it that a rank read what a fault had changed, where a job stores by itself.

Guarantees: an attempt failed of what was read, or fell back because of it, only if nothing else
that is known of explains that: another fault, or a later attempt that read the same and was right.
Does not: know why a program does something; what has no other explanation may still have one.

Torch-free; for `seatrial.chaos.own_checkpoints`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from seatrial.recovery.compare import combine, disagreements
from seatrial.recovery.errors import StateError

from .actions import LIES
from .beginnings import beginning_differs
from .case import Case
from .ledger import Strike
from .run import Attempt
from .trace import Record
from .trajectory import Beginning


def met_by_all(case: Case, attempt: Attempt) -> Iterator[tuple[int, Record]]:
    for rank in range(case.run.ranks_of(attempt.number)):
        for record in case.run.trace(attempt.number, rank):
            if record["kind"] == "met":
                yield rank, record


def time_of(record: Record) -> float:
    return float(str(record["t"]))


def fell_back(beginning: Beginning, met: Record) -> bool:
    """Whether an attempt started anew, or from an older step than that of what was read.

    What is no part of a checkpoint has no step; nobody goes back because of it.
    """
    step = met.get("step")
    return isinstance(step, int) and (beginning.restored or 0) < step


def why_it_may_have_gone_back(case: Case, beginning: Beginning, met: Record) -> str | None:
    """What else may be why an attempt fell back from the step of what was read; None if nothing."""
    step, fault, attempt = int(str(met["step"])), met["fault"], beginning.attempt
    saved = [n for n in range(1, attempt) if step in case.trajectory.published[n]]
    since = max(saved, default=attempt)
    if not saved or any(case.trajectory.reached[n] >= step for n in range(since + 1, attempt)):
        return f"the checkpoint of step {step} was not whole"
    if any(case.run.attempts[n - 1].store.lost for n in range(since, attempt)):
        return "the disk had lost power"
    before = [strike for strike in case.run.strikes() if strike.t < beginning.t]
    for strike in before:
        if strike.fault != fault and _concerns(case, strike, step, range(since, attempt + 1)):
            return f"the fault '{case.schedule.faults[strike.fault]}' struck there as well"
    return None


def _concerns(case: Case, strike: Strike, step: int, attempts: range) -> bool:
    """Whether a fault of the storage may have taken the checkpoint of a step, or the sight of it
    from the last of the attempts."""
    if strike.attempt not in attempts or strike.action not in {*LIES, "fail"}:
        return False
    damaged = {
        record["step"]
        for _, _, trace in case.run.traces()
        for record in trace
        if record["kind"] == "damage" and record["fault"] == strike.fault
    }
    is_once = case.schedule.faults[strike.fault].times == 1
    if strike.attempt == attempts[-1]:
        return True
    return step in damaged or (not damaged and not (is_once and strike.step not in (None, step)))


def may_have_failed_of(case: Case, attempt: Attempt, reader: int, met: Record) -> bool:
    """Whether the attempt may have failed of what ``reader`` had read, or of that as well.

    The reader raised an error next; or in a restart another rank did, which may have spoken for it.
    If a later attempt read the same and was right, it was not that.
    """
    errors = _next_errors(case, attempt, reader, met)
    return bool(errors) and not _was_accepted_later(case, attempt, met)


def failed_of(case: Case, attempt: Attempt, reader: int, met: Record) -> bool:
    """Whether it did, and no other fault may have been the cause."""
    if not may_have_failed_of(case, attempt, reader, met):
        return False
    fault, before = met["fault"], min(_next_errors(case, attempt, reader, met))
    return not _was_struck(case, attempt, fault, before=before) and not any(
        other["fault"] != fault and time_of(other) < before
        for _, other in met_by_all(case, attempt)
    )


def _next_errors(case: Case, attempt: Attempt, reader: int, met: Record) -> list[float]:
    """When ranks failed that may have done so because of what was read."""
    return [
        time_of(error)
        for rank in range(case.run.ranks_of(attempt.number))
        if (error := case.run.error_of(attempt, rank)) is not None
        if _comes_next(case, attempt, reader, met, rank, error)
    ]


def _comes_next(
    case: Case, attempt: Attempt, reader: int, met: Record, rank: int, error: Record
) -> bool:
    """Whether the reader had neither begun nor completed a step or a save in between; if the error
    is another rank's, nobody had begun."""
    if time_of(error) <= time_of(met):
        return False
    for each in range(case.run.ranks_of(attempt.number)):
        for record in case.run.trace(attempt.number, each):
            if time_of(record) >= time_of(error):
                break
            if record["kind"] == "began" and rank != reader:
                return False
            is_between = each == reader and time_of(record) > time_of(met)
            if is_between and record["kind"] in ("began", "step", "published"):
                return False
    return True


def _was_struck(case: Case, attempt: Attempt, fault: object, *, before: float) -> bool:
    """Whether another fault had struck, and its rank has completed nothing since."""
    for strike in case.run.strikes():
        if strike.attempt != attempt.number or strike.fault == fault or strike.t >= before:
            continue
        if not any(
            strike.t < time_of(record) < before and record["kind"] in ("began", "step", "published")
            for record in case.run.trace(strike.attempt, strike.rank)
        ):
            return True
    return False


def _was_accepted_later(case: Case, attempt: Attempt, met: Record) -> bool:
    """Whether a later attempt read the same, and began from it with the right state."""
    for later in case.run.attempts[attempt.number :]:
        beginning = case.trajectory.beginning(later.number)
        if beginning is None or fell_back(beginning, met):
            continue
        for _, record in met_by_all(case, later):
            is_same = (record["fault"], record["file"]) == (met["fault"], met["file"])
            if is_same and time_of(record) < beginning.t:
                return beginning_differs(case, beginning) is None
    return False


def began_wrongly(case: Case, attempt: int, began: Mapping[str, Any]) -> str | None:
    """What of its own part of the state a rank began wrongly with, where others never began.

    A tensor of which the rank holds a piece is not looked at.
    """
    part, leg = began["fingerprint"], case.leg_of(attempt)
    steps = leg.oracle.steps if leg else ()
    reference = next((step.state for step in steps if step.number == began["restored"]), None)
    if reference is None:
        return None
    own = {f"{name}@rank{part['rank']}": value for name, value in part["own"].items()}
    alone = {"rank": 0, "own": {}, "shared": part["shared"] | own}
    try:
        found = combine([alone | {"tensors": part["tensors"]}], world_size=1)
    except StateError:
        found = combine([alone | {"tensors": {}}], world_size=1)
    uneven = set(disagreements(reference))
    for component, values in found.items():
        for name, value in values.items():
            expected = reference.get(component, {}).get(name)
            if expected not in (None, value) and (component, name) not in uneven:
                return f"{name} differs"
    return None
