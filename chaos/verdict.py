"""Judging a run against the reference: one verdict, one sentence, the first thing that differs.

Guarantees: a verdict is reached only from evidence that is there. A fault that did not strike, or
struck without effect, is NOT_EXERCISED whatever else the run did; an attempt that failed without a
strike, a step that was not compared, or a reference that lacks a step can never end in RECOVERED.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from seatrial.recovery.compare import Difference, first_difference

from .diagnosis import likely_cause
from .effects import ineffective_strikes
from .fault import DAMAGE
from .run import Attempt, Run
from .samples import sample_faults
from .schedule import Schedule
from .trajectory import Beginning, Step, Trajectory, read_trajectory


class Verdict(StrEnum):
    """How a trial ended; see DESIGN's words in ``docs/verdicts.md``."""

    RECOVERED = "RECOVERED"
    STOPPED = "STOPPED"
    DIVERGED = "DIVERGED"
    LOST_WORK = "LOST_WORK"
    TORN = "TORN"
    CORRUPTION_UNDETECTED = "CORRUPTION_UNDETECTED"
    HUNG = "HUNG"
    UNRECOVERABLE = "UNRECOVERABLE"
    LEAKED = "LEAKED"
    NOT_EXERCISED = "NOT_EXERCISED"


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


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Why a run did not recover."""

    verdict: Verdict
    reason: str
    component: str = ""
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """The evidence: a run, what was meant to happen to it, and the reference."""

    reference: Trajectory
    run: Run
    trajectory: Trajectory
    schedule: Schedule
    checkpoint_interval: int
    expected_steps: range

    @property
    def damaged_steps(self) -> set[int]:
        """Steps whose checkpoint the schedule damaged."""
        return {
            int(str(record["step"]))
            for _, _, trace in self.run.traces()
            for record in trace
            if record["kind"] == "damage"
        }


def judge(
    reference: Trajectory,
    run: Run,
    schedule: Schedule,
    *,
    checkpoint_interval: int,
    expected_steps: range,
) -> Judgement:
    """Compare ``run`` with the reference of the same job, topology and seed.

    ``expected_steps`` are those that the surviving lineage must consist of.
    """
    case = Case(
        reference=reference,
        run=run,
        trajectory=read_trajectory(run),
        schedule=schedule,
        checkpoint_interval=checkpoint_interval,
        expected_steps=expected_steps,
    )
    lost = _steps_lost(case)
    finding = next((found for check in _CHECKS for found in check(case)), None)
    beginnings = case.trajectory.beginnings
    notes = [note for beginning in beginnings for note in beginning.notes]
    return Judgement(
        verdict=finding.verdict if finding else Verdict.RECOVERED,
        reason=finding.reason if finding else _success(case),
        attempts=len(run.attempts),
        steps_lost=sum(lost),
        recovery_s=_recovery_s(case),
        component=finding.component if finding else "",
        step=finding.step if finding else None,
        notes=tuple(dict.fromkeys([*notes, *([run.note] if run.note else [])])),
    )


def _success(case: Case) -> str:
    compared = len(case.trajectory.steps)
    return f"all {compared} steps and {len(case.trajectory.beginnings)} beginnings are equal"


def _was_exercised(case: Case) -> Iterator[Finding]:
    for reason in ineffective_strikes(case.run, case.schedule):
        yield Finding(verdict=Verdict.NOT_EXERCISED, reason=reason)


def _is_explained(case: Case) -> Iterator[Finding]:
    """Every attempt that did not complete must have been struck in that attempt."""
    struck = {strike.attempt for strike in case.run.strikes() if strike.action not in DAMAGE}
    for attempt in case.run.attempts:
        if attempt.ending != "completed" and attempt.number not in struck:
            hung = attempt.ending == "hung"
            yield Finding(
                verdict=Verdict.HUNG if hung else Verdict.UNRECOVERABLE,
                reason=f"attempt {attempt.number} failed though no fault struck in it: "
                f"{attempt.cause}{_said(attempt)}",
            )


def _said(attempt: Attempt) -> str:
    lines = attempt.output.splitlines()
    return f" (last output: {lines[-1].strip()})" if lines else ""


def _store_is_whole(case: Case) -> Iterator[Finding]:
    """What was published, and not damaged by the schedule, must be valid after every attempt."""
    for attempt in case.run.attempts:
        for step, why in sorted(attempt.store.damaged.items()):
            if step not in case.damaged_steps:
                yield Finding(
                    verdict=Verdict.TORN,
                    reason=f"after attempt {attempt.number} the published checkpoint of step "
                    f"{step} is damaged, and no fault damaged it: {why}",
                    step=step,
                )


def _acknowledged_is_kept(case: Case) -> Iterator[Finding]:
    """The newest acknowledged checkpoint must still be there when its attempt is over."""
    for attempt in case.run.attempts:
        acknowledged = case.trajectory.published[attempt.number] - case.damaged_steps
        newest = max(acknowledged, default=None)
        if newest is not None and newest > (attempt.store.newest_valid or 0):
            yield Finding(
                verdict=Verdict.TORN,
                reason=f"attempt {attempt.number} acknowledged the checkpoint of step {newest}, "
                f"but the store's newest valid one is {attempt.store.newest_valid}",
                step=newest,
            )


def _resumed_from_newest(case: Case) -> Iterator[Finding]:
    for before, after in pairwise(case.run.attempts):
        beginning = case.trajectory.beginning(after.number)
        if beginning is None:
            continue
        newest, restored = before.store.newest_valid, beginning.restored
        where = f"attempt {after.number} resumed from step {restored}"
        if restored is not None and restored in before.store.damaged:
            yield Finding(
                verdict=Verdict.CORRUPTION_UNDETECTED,
                reason=f"{where}, whose checkpoint is damaged: {before.store.damaged[restored]}",
                step=restored,
            )
        elif (restored or 0) < (newest or 0):
            yield Finding(
                verdict=Verdict.LOST_WORK,
                reason=f"{where}, though the checkpoint of step {newest} was valid",
                step=restored,
            )
        elif (restored or 0) > (newest or 0):
            yield Finding(
                verdict=Verdict.TORN,
                reason=f"{where}, which was never published; the newest valid was {newest}",
                step=restored,
            )


def _states_are_equal(case: Case) -> Iterator[Finding]:
    expected = {step.number: step for step in case.reference.steps}
    fresh = case.reference.beginnings[0]
    for beginning in case.trajectory.beginnings:
        if beginning.restored is None:
            yield from _compare_beginning(beginning, fresh.state, "right after the start")
        elif beginning.restored in expected:
            where = f"right after the restore of step {beginning.restored}"
            yield from _compare_beginning(beginning, expected[beginning.restored].state, where)
        else:
            yield Finding(
                verdict=Verdict.DIVERGED,
                reason=f"attempt {beginning.attempt} resumed from step {beginning.restored}, "
                "which the reference never reached",
            )
        for step in case.trajectory.of_attempt(beginning.attempt):
            yield from _compare_step(step, expected.get(step.number))


def _compare_beginning(beginning: Beginning, expected: object, where: str) -> Iterator[Finding]:
    difference = first_difference(expected, beginning.state)  # type: ignore[arg-type]
    if difference is not None:
        yield _diverged(difference, f"attempt {beginning.attempt}, {where}", beginning.restored)


def _compare_step(step: Step, expected: Step | None) -> Iterator[Finding]:
    where = f"attempt {step.attempt}, step {step.number}"
    if expected is None:
        reason = f"{where}: the reference has no such step"
        yield Finding(verdict=Verdict.DIVERGED, reason=reason, step=step.number)
        return
    for rank, (ours, theirs) in enumerate(zip(step.outputs, expected.outputs, strict=True)):
        for name in theirs:
            if ours.get(name) != theirs[name]:
                yield Finding(
                    verdict=Verdict.DIVERGED,
                    reason=f"{where}: the {name} of rank {rank} differs from the reference "
                    f"({ours.get(name)} instead of {theirs[name]})",
                    component="outputs",
                    step=step.number,
                )
    difference = first_difference(expected.state, step.state)
    if difference is not None:
        yield _diverged(difference, where, step.number)


def _diverged(difference: Difference, where: str, step: int | None) -> Finding:
    cause = likely_cause(difference)
    return Finding(
        verdict=Verdict.DIVERGED,
        reason=f"{where}: {difference}{f'; {cause}' if cause else ''}",
        component=difference.component,
        step=step,
    )


def _ended_well(case: Case) -> Iterator[Finding]:
    if case.run.completed:
        return
    last = case.run.attempts[-1]
    after = f"after {len(case.run.attempts)} attempt(s)"
    if last.ending == "hung":
        yield Finding(verdict=Verdict.HUNG, reason=f"gave up {after}: {last.cause}")
    elif last.store.newest_valid is None and any(case.trajectory.published.values()):
        yield Finding(
            verdict=Verdict.UNRECOVERABLE,
            reason=f"gave up {after}, no valid checkpoint is left: {last.cause}",
        )
    else:
        kept = last.store.newest_valid
        yield Finding(
            verdict=Verdict.STOPPED,
            reason=f"gave up {after}: {last.cause}; the checkpoint of step {kept} is valid",
        )


def _every_step_was_compared(case: Case) -> Iterator[Finding]:
    numbers = [step.number for step in case.trajectory.lineage()]
    expected = list(case.expected_steps)
    if numbers != expected:
        yield Finding(
            verdict=Verdict.UNRECOVERABLE,
            reason=f"the surviving lineage has the steps {numbers} instead of {expected}",
        )


def _samples_are_used_once(case: Case) -> Iterator[Finding]:
    for reason in sample_faults(case.trajectory):
        yield Finding(verdict=Verdict.DIVERGED, reason=reason, component="sampler")


def _no_more_lost_than_allowed(case: Case) -> Iterator[Finding]:
    generations = 1 + len(case.damaged_steps)
    allowed = case.checkpoint_interval * generations
    for attempt, lost in enumerate(_steps_lost(case), start=1):
        if lost > allowed:
            yield Finding(
                verdict=Verdict.LOST_WORK,
                reason=f"{lost} steps of attempt {attempt} had to be repeated, more than the "
                f"{allowed} between checkpoints",
            )


def _nothing_is_left(case: Case) -> Iterator[Finding]:
    last = case.run.attempts[-1]
    left = [*last.strays, *last.litter, *last.store.leftovers]
    if left:
        shown = ", ".join(left[:3]) + (" …" if len(left) > 3 else "")
        yield Finding(
            verdict=Verdict.LEAKED,
            reason=f"the finished run left {len(left)} thing(s) behind: {shown}",
        )


def _steps_lost(case: Case) -> list[int]:
    """For each attempt but the last, how many completed steps the next one had to repeat."""
    lost = []
    for before, after in pairwise(case.run.attempts):
        beginning = case.trajectory.beginning(after.number)
        resumed = (beginning.restored or 0) if beginning else before.store.newest_valid or 0
        lost.append(max(0, case.trajectory.reached[before.number] - resumed))
    return lost


def _recovery_s(case: Case) -> float | None:
    times = []
    for strike in case.run.strikes():
        later = [step.t for step in case.trajectory.steps if step.attempt > strike.attempt]
        if later and strike.action not in DAMAGE:
            times.append(min(later) - strike.t)
    return max(times, default=None)


_CHECKS: tuple[Callable[[Case], Iterator[Finding]], ...] = (
    _was_exercised,
    _store_is_whole,
    _acknowledged_is_kept,
    _resumed_from_newest,
    _states_are_equal,
    _is_explained,
    _ended_well,
    _every_step_was_compared,
    _samples_are_used_once,
    _no_more_lost_than_allowed,
    _nothing_is_left,
)
"""In the order in which a finding is preferred: causes before their consequences."""
