"""Running trials inside pytest: what a test calls, what it raises, and the numbers it leaves.

A trial's numbers become user properties of its test, which is how they reach ``--junitxml``, the
summary table and, under xdist, the controlling process.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from seatrial.chaos.schedule import Schedule
from seatrial.chaos.session import Session, Trial
from seatrial.chaos.verdict import Verdict

from .options import ChaosOptions, as_arguments, crippled, experiment, override
from .preflight import PlannedTrial
from .progress import ProgressLine

CONTROL_STEPS = 2
"""How far a control goes on after its restore."""


class TrialFailedError(Exception):
    """A trial did not end as expected; the message is the whole report."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the summary."""

    fault: str
    verdict: str
    passed: bool
    attempts: int
    steps_lost: int
    recovery_s: float | None
    total_s: float


ROW_PROPERTY = "chaos_row"


class TrialRunner:
    """Runs planned trials with the options of this pytest session."""

    def __init__(
        self, options: ChaosOptions, session: Callable[[], Session], progress: ProgressLine
    ) -> None:
        self.options = options
        self._session = session
        self._progress = progress

    def run(
        self,
        planned: PlannedTrial,
        node: pytest.Item,
        *,
        options: ChaosOptions,
        expect: Verdict | None,
        replay: str,
    ) -> Trial:
        """Run one trial and record its row on ``node``.

        Raises:
            TrialFailedError: another verdict than expected, or a control that missed.
            UsageError: the trial cannot be run.
        """
        session, subject = self._session(), experiment(options)
        with self._progress.of(planned.name, subject.steps) as report:
            if planned.omit:
                known = session.reference(subject, progress=report).trajectory.beginnings[0].state
                if planned.omit not in known:
                    pytest.skip(f"the job has no {planned.omit} to leave out")
                workload = crippled(subject.workload, planned.omit, stop_after=CONTROL_STEPS)
                trial = session.control(subject, workload, steps=CONTROL_STEPS, progress=report)
            else:
                trial = session.trial(subject, planned.schedule, progress=report)
        problem = _problem(planned, trial, expect)
        self._record(node, planned, trial, passed=not problem)
        if problem:
            kept = self._keep(session, trial, planned, options)
            raise TrialFailedError(_report(planned, trial, problem, replay, kept))
        return trial

    def _record(
        self, node: pytest.Item, planned: PlannedTrial, trial: Trial, *, passed: bool
    ) -> None:
        judgement = trial.judgement
        row = Row(
            fault=planned.name,
            verdict=str(trial.verdict) + (" (ok)" if planned.omit and passed else ""),
            passed=passed,
            attempts=judgement.attempts,
            steps_lost=judgement.steps_lost,
            recovery_s=judgement.recovery_s,
            total_s=trial.run.total_s,
        )
        node.user_properties += [
            ("chaos_fault", row.fault if planned.omit else str(planned.schedule)),
            ("chaos_verdict", str(trial.verdict)),
            ("chaos_attempts", row.attempts),
            ("chaos_steps_lost", row.steps_lost),
            ("chaos_recovery_s", round(row.recovery_s, 3) if row.recovery_s is not None else ""),
            (ROW_PROPERTY, json.dumps(asdict(row))),
        ]

    def _keep(
        self, session: Session, trial: Trial, planned: PlannedTrial, options: ChaosOptions
    ) -> Path | None:
        if not options.artifacts:
            return None
        name = "".join(c if c.isalnum() or c in "-." else "_" for c in planned.name).strip("_")
        directory = Path(options.artifacts) / name
        session.keep(trial, directory)
        return directory


class ChaosTrial:
    """What the fixture ``chaos_trial`` gives to a test."""

    def __init__(self, runner: TrialRunner, node: pytest.Item) -> None:
        self._runner = runner
        self._node = node

    def __call__(
        self,
        schedule: str | Schedule = "clean",
        *,
        expect: str | None = Verdict.RECOVERED,
        omit: str = "",
        **options: object,
    ) -> Trial:
        """Run the job under ``schedule`` and return the trial.

        Args:
            schedule: faults as text, such as ``kill rank=1 at=step:12/backward``.
            expect: the verdict that makes the test pass; None accepts any, but NOT_EXERCISED
                always fails.
            omit: leave this state component out of a restore instead; expects DIVERGED in it.
            options: any ``--chaos-`` option by name, with ``params`` for the job's own. They
                override the test's ``chaos`` marker, which overrides the command line.
        """
        __tracebackhide__ = True
        marked: dict[str, object] = {}
        for mark in reversed(list(self._node.iter_markers("chaos"))):
            marked |= mark.kwargs
        chosen = override(self._runner.options, marked | options)
        if isinstance(schedule, str):
            schedule = Schedule.parse(schedule)
        planned = PlannedTrial(
            name=f"control[{omit}]" if omit else schedule.label, schedule=schedule, omit=omit
        )
        return self._runner.run(
            planned,
            self._node,
            options=chosen,
            expect=Verdict.DIVERGED if omit else None if expect is None else Verdict(expect),
            replay=f"pytest --chaos {shlex.quote(self._node.nodeid)}",
        )


def replay_line(planned: PlannedTrial, options: ChaosOptions) -> str:
    """The command that runs one planned trial again."""
    command = f"pytest {as_arguments(options)}"
    if planned.omit:
        return f"{command} -k {shlex.quote(planned.name)}"
    return f"{command} --chaos-fault {shlex.quote(str(planned.schedule))}"


def _problem(planned: PlannedTrial, trial: Trial, expect: Verdict | None) -> str:
    judgement = trial.judgement
    if planned.omit:
        if trial.verdict is Verdict.DIVERGED and judgement.component == planned.omit:
            return ""
        if trial.verdict is Verdict.RECOVERED:
            return (
                f"blind spot: a restore without the {planned.omit} was not noticed. Either the run "
                "is too short for it to matter, or the job does not use it"
            )
        blamed = f" in {judgement.component}" if judgement.component else ""
        return (
            f"a restore without the {planned.omit} must be called DIVERGED in {planned.omit}, "
            f"not {trial.verdict}{blamed}: {judgement.reason}"
        )
    if trial.verdict is Verdict.NOT_EXERCISED or expect not in (None, trial.verdict):
        wanted = f" instead of {expect}" if expect not in (None, trial.verdict) else ""
        return f"{trial.verdict}{wanted}: {judgement.reason}"
    return ""


def _report(
    planned: PlannedTrial, trial: Trial, problem: str, replay: str, kept: Path | None
) -> str:
    lines = [problem, "", f"fault:    {planned.schedule}"]
    for attempt in trial.run.attempts:
        resumed = f", {attempt.cause}" if attempt.cause else ""
        lines.append(f"attempt {attempt.number}: {attempt.ending}{resumed}")
    lines += [f"note:     {note}" for note in trial.judgement.notes]
    last = next((each for each in reversed(trial.run.attempts) if each.output), None)
    if last is not None:
        whose = "the launcher" if last.culprit is None else f"rank {last.culprit}"
        lines += ["", f"last output of {whose} in attempt {last.number}:"]
        lines += [f"    {line}" for line in last.output.splitlines()]
    lines += ["", f"replay:   {replay}"]
    lines += [f"kept:     {kept}"] if kept else []
    return "\n".join(lines)
