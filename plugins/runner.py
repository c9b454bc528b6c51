"""Running trials inside pytest: what the pre-flight's items and the fixture have in common."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from seatrial.chaos.errors import ChaosError, UsageError
from seatrial.chaos.launch.plan import calls_file
from seatrial.chaos.reference import Reference
from seatrial.chaos.schedule import Schedule
from seatrial.chaos.session import Session, Trial
from seatrial.chaos.timing.timing import timing_lines
from seatrial.chaos.verdict import Verdict
from seatrial.recovery.collectives import read_calls

from .options import (
    ChaosOptions,
    as_arguments,
    crippled,
    experiment,
    handover,
    override,
    reshard_routes,
)
from .preflight import COMPONENTS, EXTRAS, PlannedTrial, control, resharded
from .progress import ProgressLine
from .report import failure_report, problem_with
from .rows import as_properties, row_of

TIMES = "rank times"
"""The section of a test's report with the times of its trials; pytest adds words of its own."""

CONTROL_STEPS = 2
"""How far a control goes on after its restore."""


class TrialFailedError(Exception):
    """A trial did not end as expected; the message is the whole report."""


class TrialRunner:
    """Runs planned trials with the options of this pytest session."""

    def __init__(
        self, options: ChaosOptions, session: Callable[[], Session], progress: ProgressLine
    ) -> None:
        self.options = options
        self._session = session
        self._progress = progress

    def run_item(self, planned: PlannedTrial, node: pytest.Item) -> None:
        """Run a trial of the pre-flight, or skip it aloud where the job has nothing to omit.

        Raises:
            TrialFailedError: another verdict than expected, or a control that missed.
            UsageError: the trial cannot be run.
        """
        options = self.options
        if planned.omit:
            omitted = [planned.omit]
            known = self._components(options)
            if planned.omit == EXTRAS:
                omitted = [name for name in known if name not in COMPONENTS]
            if not set(omitted) & set(known):
                pytest.skip(f"the job's state has no {planned.omit} to leave out")
            for component in omitted:
                each = control(component)
                replay = replay_line(planned, options)
                self.run(each, node, options=options, expect=each.expect, replay=replay)
            return
        if planned.needs and not self._makes(options, planned.needs):
            call = "call to a process group" if planned.needs == "*" else planned.needs
            pytest.skip(f"the job makes no {call}")
        replay = replay_line(planned, options)
        self.run(planned, node, options=options, expect=planned.expect, replay=replay)

    def run(
        self,
        planned: PlannedTrial,
        node: pytest.Item,
        *,
        options: ChaosOptions,
        expect: Verdict | None,
        replay: str,
    ) -> Trial:
        """Run one trial and leave its numbers on ``node``.

        Raises:
            TrialFailedError: another verdict than expected, or a control that missed.
            UsageError: the trial cannot be run.
        """
        session, subject = self._session(), experiment(options)
        if planned.omit and planned.omit not in (known := self._components(options)):
            raise UsageError(
                f"omit={planned.omit!r}: the job's state has no such component; "
                f"it has {', '.join(known)}"
            )
        with self._progress.of(planned.name, subject.steps) as report:
            if planned.omit:
                workload = crippled(subject.workload, planned.omit, stop_after=CONTROL_STEPS)
                trial = session.control(subject, workload, steps=CONTROL_STEPS, progress=report)
            elif planned.reshard:
                (route,) = reshard_routes(replace(options, reshard=planned.reshard))
                trial = session.reshard(
                    subject, planned.schedule, handover(options, route), progress=report
                )
            else:
                trial = session.trial(subject, planned.schedule, progress=report)
        problem = problem_with(planned, trial, expect)
        node.user_properties += as_properties(row_of(planned, trial, passed=not problem))
        # Shown with a failure by pytest, and with -v by the summary.
        times = "\n".join((f"{planned.name}:", *timing_lines(trial.timing)))
        node.add_report_section("call", TIMES, times)
        if problem:
            kept = self._keep(session, trial, planned, options)
            text = failure_report(planned, trial, problem, replay=replay, kept=kept)
            raise TrialFailedError(text)
        return trial

    def _components(self, options: ChaosOptions) -> tuple[str, ...]:
        """The components of the job's state, as its reference has them."""
        return tuple(self._reference(options).trajectory.beginnings[0].state)

    def _makes(self, options: ChaosOptions, operation: str) -> bool:
        """Whether the last rank of the reference made such a call; ``operation`` is a pattern."""
        directory = self._reference(options).run.directory
        calls = read_calls(calls_file(directory, 1, experiment(options).world.ranks - 1))
        return any(fnmatchcase(call.operation, operation) for call in calls)

    def _reference(self, options: ChaosOptions) -> Reference:
        subject = experiment(options)
        with self._progress.of("reference", subject.steps) as report:
            return self._session().reference(subject, progress=report)

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
        self.called = False

    def __call__(
        self,
        schedule: str | Schedule = "clean",
        *,
        expect: str | None = Verdict.RECOVERED,
        omit: str = "",
        reshard: str = "",
        **options: object,
    ) -> Trial:
        """Run the job under ``schedule`` and return the trial.

        Args:
            schedule: faults as text, such as ``kill rank=1 at=step:12/backward``.
            expect: the verdict that makes the test pass; None accepts any, but NOT_EXERCISED
                always fails.
            omit: leave this state component out of a restore instead; expects DIVERGED in it.
            reshard: restart on this topology, or on one after another (``dp2:dp4``), and compare
                with the hand-off oracle there.
            options: any ``--chaos-`` option of one run by name, with ``params`` for the job's own.
                They override the test's ``chaos`` marker, which overrides the command line.

        Raises:
            TrialFailedError: the trial ended otherwise; the message is the report.
            UsageError: the trial cannot be run.
        """
        __tracebackhide__ = True
        self.called = True
        try:
            return self._run(schedule, expect=expect, omit=omit, reshard=reshard, options=options)
        except (ChaosError, TrialFailedError) as error:
            raise error.with_traceback(None) from None  # which of our functions it was tells nobody

    def _run(
        self,
        schedule: str | Schedule,
        *,
        expect: str | None,
        omit: str,
        reshard: str,
        options: dict[str, object],
    ) -> Trial:
        marked: dict[str, object] = {}
        for mark in reversed(list(self._node.iter_markers("chaos"))):
            if mark.args:
                raise UsageError(
                    f"the marker chaos({mark.args[0]!r}) takes options by name alone; give a "
                    "schedule to chaos_trial"
                )
            marked |= mark.kwargs
        beside = self._node.path.parent
        given = replace(self._runner.options, reshard="")  # the pre-flight's, not this test's
        chosen = override(given, marked | options | {"reshard": reshard}, beside=beside)
        routes = reshard_routes(chosen)
        if len(routes) > 1:
            raise UsageError(f"reshard={reshard!r} names several topologies; call once for each")
        if isinstance(schedule, str):
            schedule = Schedule.parse(schedule)
        if not isinstance(schedule, Schedule):
            raise UsageError(
                f"{schedule!r} is no schedule; give text, or a seatrial.chaos.Schedule"
            )
        if omit and (schedule.faults or reshard or expect not in _WITH_OMIT):
            raise UsageError(
                f"omit={omit!r} is a control: it runs without faults, reshard= or expect=, and "
                "passes if the verdict is DIVERGED"
            )
        if not schedule.seed:
            schedule = replace(schedule, seed=chosen.seed)
        planned = control(omit) if omit else PlannedTrial(name=schedule.label, schedule=schedule)
        if routes and not omit:
            restarts = routes[0].restarts
            planned = resharded(restarts, schedule, name=f"{schedule.label}@{restarts}")
        return self._runner.run(
            planned,
            self._node,
            options=chosen,
            expect=Verdict.DIVERGED if omit else _expected(expect),
            replay=f"pytest {as_arguments(self._runner.options)} {shlex.quote(self._node.nodeid)}",
        )


_WITH_OMIT = (Verdict.RECOVERED, Verdict.DIVERGED)
"""The verdicts that may be expected of a control: what stands there by default, and what it is."""


def _expected(name: str | None) -> Verdict | None:
    if name is not None and name not in list(Verdict):
        raise UsageError(
            f"expect={name!r} is no verdict; choose None or one of {', '.join(Verdict)}"
        )
    return None if name is None else Verdict(name)


def replay_line(planned: PlannedTrial, options: ChaosOptions) -> str:
    """The command that runs one planned trial again."""
    command = f"pytest {as_arguments(replace(options, reshard=planned.reshard))}"
    if planned.omit:
        return f"{command} -k {shlex.quote(planned.name)}"
    return f"{command} --chaos-fault {shlex.quote(str(planned.schedule))}"
