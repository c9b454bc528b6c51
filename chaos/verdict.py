"""Judging a run against the reference: one verdict, one sentence, the first thing that differs.

Guarantees: a verdict is reached only from evidence that is there. A fault that did not strike, or
struck without effect, is NOT_EXERCISED whatever else the run did; an attempt that failed without a
strike, a step that was not compared, or a reference that lacks a step can never end in RECOVERED.
Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

from .actions import DAMAGE
from .bending import is_abandoned, is_abandoned_beginning
from .case import Case, Resharded, Verdict
from .checks import CHECKS
from .own_checkpoints import taken_on_trust
from .run import Run
from .schedule import Schedule
from .trajectory import Trajectory, read_trajectory
from .uncompared import uncompared
from .unseen import notes_of

__all__ = ["Judgement", "Verdict", "judge"]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A verdict with its numbers. ``steps_lost`` counts steps that had to be repeated.

    ``recovery_s`` is the longest time from a strike to the first step completed after it; None if
    no attempt followed. ``component`` is the first state component that differs.
    """

    verdict: Verdict
    reason: str
    attempts: int
    steps_lost: int = 0
    recovery_s: float | None = None
    component: str = ""
    step: int | None = None
    notes: tuple[str, ...] = ()


def judge(
    reference: Trajectory,
    run: Run,
    schedule: Schedule,
    *,
    checkpoint_interval: int,
    expected_steps: range,
    resharded: Resharded | None = None,
) -> Judgement:
    """Compare ``run`` with the reference of the same job, topology and seed.

    ``expected_steps`` are those that the surviving lineage must consist of; ``resharded`` says what
    attempts on another topology are compared with.
    """
    case = Case(
        reference=reference,
        run=run,
        trajectory=read_trajectory(run),
        schedule=schedule,
        checkpoint_interval=checkpoint_interval,
        expected_steps=expected_steps,
        resharded=resharded,
    )
    finding = next((found for check in CHECKS for found in check(case)), None)
    beginnings = case.trajectory.beginnings
    notes = [note for beginning in beginnings for note in beginning.notes]
    return Judgement(
        verdict=finding.verdict if finding else Verdict.RECOVERED,
        reason=finding.reason if finding else _success(case),
        attempts=len(run.attempts),
        steps_lost=sum(case.steps_lost()),
        recovery_s=_recovery_s(case),
        component=finding.component if finding else "",
        step=finding.step if finding else None,
        notes=tuple(
            dict.fromkeys(
                [
                    *notes,
                    *notes_of(run, schedule),
                    *taken_on_trust(case),
                    *uncompared(run),
                    *([run.note] if run.note else []),
                ]
            )
        ),
    )


def _success(case: Case) -> str:
    steps, beginnings = case.trajectory.steps, case.trajectory.beginnings
    excused = sum(is_abandoned(case, each) for each in steps)
    anew = sum(is_abandoned_beginning(case, each) for each in beginnings)
    said = f"all {len(steps) - excused} steps and {len(beginnings) - anew} beginnings are equal"
    if excused or anew:
        said += f"; of {excused + anew} more after a bent call nothing is in the final state"
    return said


def _recovery_s(case: Case) -> float | None:
    times = []
    for strike in case.run.strikes():
        later = [step.t for step in case.trajectory.steps if step.attempt > strike.attempt]
        if later and strike.action not in DAMAGE:
            times.append(min(later) - strike.t)
    return max(times, default=None)
