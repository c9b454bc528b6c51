"""Does a run equal the reference, bitwise? Where each attempt began, then each of its steps.

Torch-free; a question of `seatrial.chaos.checks`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from seatrial.recovery.compare import first_difference, first_misplaced

from .beginnings import compare_beginning, diverged
from .bending import is_abandoned, is_abandoned_beginning
from .case import Case, Finding, Verdict
from .trajectory import UNSAVED, Step


def states_are_equal(case: Case) -> Iterator[Finding]:
    """Where each attempt began, then each of its steps, bitwise against the reference."""
    for attempt in case.run.attempts:
        beginning = case.trajectory.beginning(attempt.number)
        steps = case.trajectory.of_attempt(attempt.number)
        leg = case.leg_of(attempt.number)
        expected = {step.number: step for step in leg.oracle.steps} if leg else {}
        was_equal = False
        if beginning is not None and leg is None:
            yield Finding(
                verdict=Verdict.UNRECOVERABLE,
                reason=f"nothing tells what attempt {attempt.number} must equal: no earlier "
                "attempt that began on the job's own topology leads to where it began",
            )
        elif beginning is not None and leg is not None:
            if not is_abandoned_beginning(case, beginning):
                found = list(compare_beginning(case, beginning, leg, expected))
                was_equal = beginning.restored is not None and not found
                yield from found
        elif steps or attempt.ending == "completed":
            yield Finding(
                verdict=Verdict.UNRECOVERABLE,
                reason=f"attempt {attempt.number} ran, but not every rank recorded from which "
                "state it began",
            )
        resumed = beginning is not None and beginning.restored is not None
        hazards = beginning.hazards if beginning is not None and resumed else ()
        for step in steps:
            if is_abandoned(case, step):
                continue  # what a bent collective did to it is that fault's effect
            yield from _compare_step(step, expected.get(step.number), hazards, was_equal)


_DECIDED_BY = {
    **dict.fromkeys(("samples", "padding", "skipped"), "sampler"),
    "learning rate": "scheduler",
    "loss scale": "scaler",
}
"""The component that decides an output of a step; the loss depends on all."""


def _compare_step(
    step: Step, expected: Step | None, hazards: Collection[str], was_equal: bool
) -> Iterator[Finding]:
    where = f"attempt {step.attempt}, step {step.number}"
    if expected is None:
        reason = f"{where}: the reference has no such step"
        yield Finding(verdict=Verdict.DIVERGED, reason=reason, step=step.number)
        return
    outputs = list(_compare_outputs(step, expected, where))
    # A job may have left a component out of its state; what that component decides tells of it
    # before the consequences do. The loss is the last consequence.
    yield from (finding for finding in outputs if finding.component != "outputs")
    difference = first_difference(expected.state, step.state)
    difference = difference or first_misplaced(expected.holders, step.holders)
    if difference is not None:
        yield diverged(difference, where, step.number, hazards, was_equal=was_equal)
    yield from outputs


def _compare_outputs(step: Step, expected: Step, where: str) -> Iterator[Finding]:
    for rank, (ours, theirs) in enumerate(zip(step.outputs, expected.outputs, strict=True)):
        yield from _compare_unsaved(
            step, rank, ours.get(UNSAVED, {}), theirs.get(UNSAVED, {}), where
        )
        for name in theirs:
            if name != UNSAVED and ours.get(name) != theirs[name]:
                yield Finding(
                    verdict=Verdict.DIVERGED,
                    reason=f"{where}: the {name} of rank {rank} {_verb(name)} from the reference "
                    f"({ours.get(name)} instead of {theirs[name]})",
                    component=_DECIDED_BY.get(name, "outputs"),
                    step=step.number,
                )


def _verb(name: str) -> str:
    return "differ" if name == "samples" else "differs"


def _compare_unsaved(
    step: Step, rank: int, ours: Mapping[str, str], theirs: Mapping[str, str], where: str
) -> Iterator[Finding]:
    """What a job keeps outside its state is nowhere compared but here."""
    for name in {**theirs, **ours}:
        if ours.get(name) != theirs.get(name):
            yield Finding(
                verdict=Verdict.DIVERGED,
                reason=f"{where}: {name} of rank {rank}, an object of the job that its "
                "TrainingState does not hold, is not what it is in the reference; give it to "
                "TrainingState, or name it in the job's 'unsaved' if it need not come back",
                component=name,
                step=step.number,
            )
