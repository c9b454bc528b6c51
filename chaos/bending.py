"""Did a bent collective matter, and what of a run may be wrong because of it?

A call that was made otherwise has an effect if the first step that all ranks completed after it
differs from the reference, or if the attempt ended of it. Of several bent calls each must show its
own: numbers that were wrong already show nothing, and the end of an attempt is that of the last.
Where it cannot be told what an attempt ended of, no bent call is taken for the cause.

Whatever a bent call computed is excused only as long as nothing came of it: no step of the lineage
that the final state came from, and no checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .actions import BENDING
from .case import Case
from .endings import can_end
from .ledger import Strike
from .trajectory import Beginning, Step

_MISMATCH, _COPIES = "CollectiveMismatchError", "ReplicaMismatchError"


@dataclass(frozen=True, kw_only=True)
class _Bent:
    """A call that was made otherwise at time ``t``, and the steps that all ranks completed since.

    ``wrong_before`` says that an earlier bent call had already made the numbers wrong.
    """

    strike: Strike
    t: float
    equal: tuple[bool, ...]
    wrong_before: bool = False

    @property
    def changed_numbers(self) -> bool:
        return bool(self.equal) and not self.equal[0] and not self.wrong_before


def ineffective_bends(case: Case) -> Iterator[str]:
    """A sentence for every bending fault that struck, but no strike of which had an effect."""
    strikes = bends(case)
    for index, fault in enumerate(case.schedule.faults):
        reasons = [_without_effect(case, each) for each in strikes if each.fault == index]
        if reasons and all(reasons):
            yield f"the fault '{fault}' struck without effect: {reasons[0]}"


def _without_effect(case: Case, strike: Strike) -> str:
    """Why the strike had no effect, as half a sentence; empty if it had one."""
    said = _said(case, strike)
    if said is None:
        return f"rank {strike.rank} made no such call after it"
    if said["unable"]:
        return f"{said['call']}: {said['unable']}"
    bent = next(each for each in _bent_calls(case, strike.attempt) if each.strike == strike)
    if bent.changed_numbers or ended_by(case, strike):
        return ""
    done = f"{said['call']} {said['what']}"
    if bent.wrong_before:
        return f"{done}, but an earlier bent call had already made the numbers wrong"
    completed = case.run.attempts[strike.attempt - 1].ending == "completed"
    if completed and all(bent.equal):
        return f"{done}, but all that was computed equals the reference"
    since = "the next step equals the reference" if any(bent.equal[:1]) else "no step tells of it"
    ended = "" if completed else ", and that the attempt ended of it cannot be told"
    return f"{done}, but {since}{ended}"


def _said(case: Case, strike: Strike) -> dict[str, object] | None:
    trace = case.run.trace(strike.attempt, strike.rank)
    bent = [r for r in trace if r["kind"] == "bent" and r["fault"] == strike.fault]
    return bent[-1] if bent else None


def _bent_calls(case: Case, attempt: int) -> list[_Bent]:
    """The calls that were bent in an attempt, oldest first."""
    made: list[_Bent] = []
    for strike in bends(case):
        said = _said(case, strike) if strike.attempt == attempt else None
        if said is not None and not said["unable"]:
            t = float(str(said["t"]))
            steps = _steps_since(case, strike)
            equal = tuple(not is_wrong for _, is_wrong in steps)
            made.append(_Bent(strike=strike, t=t, equal=equal))
    made.sort(key=lambda each: (each.t, each.strike.t))
    return [_after(made[:index], each) for index, each in enumerate(made)]


def _after(earlier: list[_Bent], bent: _Bent) -> _Bent:
    """``bent``, and whether a step between it and an earlier call was wrong.

    Of calls with no step between them it cannot be told which one changed the numbers.
    """
    between = (each.equal[: max(0, len(each.equal) - len(bent.equal))] for each in earlier)
    is_wrong = any(False in equal for equal in between)
    return _Bent(strike=bent.strike, t=bent.t, equal=bent.equal, wrong_before=is_wrong)


def ended_by(case: Case, strike: Strike) -> bool:
    """Whether the attempt of a bending strike ended of it, as far as can be told."""
    attempt = case.run.attempts[strike.attempt - 1]
    calls = _bent_calls(case, strike.attempt)
    bent = next((each for each in calls if each.strike == strike), None)
    if bent is None or attempt.ending == "completed":
        return False
    traces = [case.run.trace(strike.attempt, r) for r in range(case.run.ranks_of(strike.attempt))]
    if all(any(r["kind"] == "ended" and not r["status"] for r in trace) for trace in traces):
        return False  # they had done all of it, and left too slowly
    errors = [record for trace in traces for record in trace if record["kind"] == "error"]
    ended_t = min((float(str(each["t"])) for each in errors), default=attempt.ended_t)
    if bent.t > ended_t:
        return False
    later = [e for e in calls if bent.t < e.t <= ended_t and e.strike.fault != strike.fault]
    if later and not bent.changed_numbers:
        return False
    types = {name for error in errors for name in (str(error["type"]), *_causes(error))}
    if not _is_plausible(bent, types):
        return False
    if types & {_MISMATCH, _COPIES}:
        return True
    others = (each for each in case.run.strikes() if each.action not in BENDING)
    return not any(each.t <= ended_t and can_end(case, each, attempt) for each in others)


def _is_plausible(bent: _Bent, types: set[str]) -> bool:
    """Whether errors of these types can come of it, going by the steps that were completed."""
    only_numbers = bent.strike.action == "garble"
    if bent.wrong_before and (only_numbers or (_MISMATCH not in types and _COPIES in types)):
        return False
    # What has come right, or never was wrong, ends nothing; that other calls were made is found
    # whatever they computed.
    return not any(bent.equal) or (not only_numbers and _MISMATCH in types)


def _causes(error: dict[str, object]) -> list[str]:
    causes = error.get("causes", [])
    assert isinstance(causes, list)
    return [str(each) for each in causes]


def _steps_since(case: Case, strike: Strike) -> list[tuple[Step, bool]]:
    """Steps that all ranks completed after the call was bent, in its attempt; whether each differs
    from what it is compared with."""
    done: list[object] = []
    for record in case.run.trace(strike.attempt, strike.rank):
        if record["kind"] == "bent" and record["fault"] == strike.fault:
            done = []
        elif record["kind"] == "step":
            done.append(record["step"])
    leg = case.leg_of(strike.attempt)
    expected = {step.number: step for step in leg.oracle.steps} if leg else {}
    return [
        (step, _differs(step, expected.get(step.number)))
        for step in case.trajectory.of_attempt(strike.attempt)
        if leg and step.number >= (strike.step or 0) and step.number in done
    ]


def _differs(step: Step, expected: Step | None) -> bool:
    return expected is None or (step.state, step.outputs) != (expected.state, expected.outputs)


def bends(case: Case) -> list[Strike]:
    """The strikes after which an attempt may compute wrong numbers."""
    strikes = case.run.strikes()
    return [each for each in strikes if each.action in BENDING]


def is_abandoned(case: Case, step: Step) -> bool:
    """Whether a bent call came before the step, and nothing of the final state came from it.

    The rank that made the call had yet to complete the step: what was wrong before is not of it.
    """
    struck = any(
        record["kind"] == "step"
        and record["step"] == step.number
        and float(str(record["t"])) >= strike.t
        for strike in bends(case)
        if strike.attempt == step.attempt
        for record in case.run.trace(strike.attempt, strike.rank)
    )
    kept = ((each.attempt, each.number) for each in case.trajectory.lineage())
    return struck and (step.attempt, step.number) not in set(kept)


def is_abandoned_beginning(case: Case, beginning: Beginning) -> bool:
    """Whether a bent call came before the beginning, while the job was built or restored, and
    nothing of the final state came from its attempt."""
    struck = any(
        strike.attempt == beginning.attempt and strike.t < beginning.t for strike in bends(case)
    )
    kept = {step.attempt for step in case.trajectory.lineage()}
    last = max(each.attempt for each in case.trajectory.beginnings)
    return struck and beginning.attempt not in kept | {last}


def wrongly_published(case: Case) -> Iterator[tuple[Step, Step]]:
    """The first wrong step after a bent call, and one whose checkpoint was published after it."""
    for strike in bends(case):
        leg = case.leg_of(strike.attempt)
        expected = {step.number: step.state for step in leg.oracle.steps} if leg else {}
        # A wrong loss alone is in no checkpoint.
        found = (step for step, is_wrong in _steps_since(case, strike) if is_wrong)
        wrong = [step for step in found if step.state != expected.get(step.number)]
        for step in wrong:
            if step.number in case.trajectory.published[strike.attempt]:
                yield wrong[0], step
