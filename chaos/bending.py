"""Did a bent collective matter, and what of a run may be wrong because of it?

A call that was made otherwise has an effect if the attempt then failed, hung, or computed something
else than the reference. Whatever it computed is excused only as long as nothing came of it: no step
of the lineage that the final state came from, and no checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator

from .actions import BENDING
from .case import Case
from .fault import Fault
from .ledger import Strike
from .trajectory import Step

_DETECTED = ("CollectiveMismatchError", "ReplicaMismatchError")


def bend_without_effect(case: Case, fault: Fault, strike: Strike) -> str:
    """Why the strike had no effect, as half a sentence; empty if it had one."""
    trace = case.run.trace(strike.attempt, strike.rank)
    bent = [r for r in trace if r["kind"] == "bent" and r["fault"] == strike.fault]
    if not bent:
        return f"rank {strike.rank} made no such call after it"
    said = bent[-1]
    if said["unable"]:
        return f"{said['call']}: {said['unable']}"
    if _ended_by(case, strike) or any(_wrong_steps(case, strike)):
        return ""
    return f"{said['call']} {said['what']}, but all that was computed equals the reference"


def _ended_by(case: Case, strike: Strike) -> bool:
    """Whether the attempt ended of it, as far as can be told from other faults' effects."""
    attempt = case.run.attempts[strike.attempt - 1]
    if attempt.ending == "completed":
        return False
    errors = [
        record
        for rank in range(case.run.ranks_of(strike.attempt))
        for record in case.run.trace(strike.attempt, rank)
        if record["kind"] == "error" and float(str(record["t"])) >= strike.t
    ]
    if any({str(e["type"]), *map(str, _causes(e))} & set(_DETECTED) for e in errors):
        return True
    others = (each for each in case.run.strikes() if each.attempt == strike.attempt)
    return not any(each.action not in (*BENDING, "delay") for each in others)


def _causes(error: dict[str, object]) -> list[object]:
    causes = error.get("causes", [])
    assert isinstance(causes, list)
    return causes


def _wrong_steps(case: Case, strike: Strike) -> Iterator[Step]:
    """Steps since the strike, in its attempt, that differ from what it is compared with."""
    leg = case.leg_of(strike.attempt)
    expected = {step.number: step for step in leg.oracle.steps} if leg else {}
    for step in case.trajectory.of_attempt(strike.attempt) if leg else ():
        if step.number >= (strike.step or 0) and _differs(step, expected.get(step.number)):
            yield step


def _differs(step: Step, expected: Step | None) -> bool:
    return expected is None or (step.state, step.outputs) != (expected.state, expected.outputs)


def bends(case: Case) -> list[Strike]:
    """The strikes after which an attempt may compute wrong numbers."""
    strikes = case.run.strikes()
    return [each for each in strikes if each.action in BENDING]


def is_abandoned(case: Case, step: Step) -> bool:
    """Whether a bent call came before the step, and nothing of the final state came from it."""
    struck = any(
        strike.attempt == step.attempt and step.number >= (strike.step or 0)
        for strike in bends(case)
    )
    kept = ((each.attempt, each.number) for each in case.trajectory.lineage())
    return struck and (step.attempt, step.number) not in set(kept)


def wrongly_published(case: Case) -> Iterator[tuple[Step, Step]]:
    """The first wrong step after a bent call, and one whose checkpoint was published after it."""
    for strike in bends(case):
        leg = case.leg_of(strike.attempt)
        expected = {step.number: step.state for step in leg.oracle.steps} if leg else {}
        # A wrong loss alone is in no checkpoint.
        found = _wrong_steps(case, strike)
        wrong = [step for step in found if step.state != expected.get(step.number)]
        for step in wrong:
            if step.number in case.trajectory.published[strike.attempt]:
                yield wrong[0], step
