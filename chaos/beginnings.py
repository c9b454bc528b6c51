"""Is the state in which an attempt began that of the reference, bitwise?

Torch-free; part of `seatrial.chaos.equality`, and what damage that was read is judged by.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from seatrial.recovery.compare import Difference, first_difference, first_misplaced

from .case import Case, Finding, Leg, Verdict
from .diagnosis import likely_cause
from .trajectory import Beginning, Step


def beginning_differs(case: Case, beginning: Beginning) -> Finding | None:
    """The first difference of the state in which an attempt began, if there is any."""
    leg = case.leg_of(beginning.attempt)
    if leg is None:
        return None
    expected = {step.number: step for step in leg.oracle.steps}
    return next(compare_beginning(case, beginning, leg, expected), None)


def compare_beginning(
    case: Case, beginning: Beginning, leg: Leg, expected: Mapping[int, Step]
) -> Iterator[Finding]:
    """The differences of where an attempt began; ``expected`` are the steps of its leg."""
    restored = beginning.restored
    where = f"attempt {beginning.attempt}"
    if restored is None:
        same: Beginning | Step = leg.oracle.beginnings[0]
        where = f"{where}, right after the start"
    elif restored == leg.since and case.resharded is not None:
        same = leg.oracle.beginnings[0]
        topology = case.resharded.route.of(beginning.attempt).topology
        where = f"{where}, right after the restore of step {restored} onto {topology}"
        yield from _compare_logical(case, beginning, where)
    elif restored in expected:
        same = expected[restored]
        where = f"{where}, right after the restore of step {restored}"
    else:
        reason = f"{where} resumed from step {restored}, which the reference never reached"
        yield Finding(verdict=Verdict.DIVERGED, reason=reason, step=restored)
        return
    difference = first_difference(same.state, beginning.state)
    difference = difference or first_misplaced(same.holders, beginning.holders)
    if difference is not None:
        yield diverged(difference, where, restored)


def _compare_logical(case: Case, beginning: Beginning, where: str) -> Iterator[Finding]:
    """What does not belong to a rank must be as the topology that saved it had it."""
    saver = case.leg_of(beginning.source)
    steps = saver.oracle.steps if saver else ()
    saved = next((step for step in steps if step.number == beginning.restored), None)
    if saved is None:
        yield Finding(
            verdict=Verdict.UNRECOVERABLE,
            reason=f"{where}: nothing tells what the attempt that saved it had",
            step=beginning.restored,
        )
        return
    expected, found = (
        {name: values for name, values in state.items() if name != "rng"}
        for state in (saved.state, beginning.state)
    )
    difference = first_difference(expected, found)
    if difference is not None:
        yield diverged(difference, where, beginning.restored)


def diverged(
    difference: Difference,
    where: str,
    step: int | None,
    hazards: Collection[str] = (),
    *,
    was_equal: bool = False,
) -> Finding:
    """The finding that ``where`` differs from the reference, with its likely cause."""
    cause = likely_cause(difference, hazards, was_equal=was_equal)
    return Finding(
        verdict=Verdict.DIVERGED,
        reason=f"{where}: {difference}{f'; {cause}' if cause else ''}",
        component=difference.component,
        step=step,
    )
