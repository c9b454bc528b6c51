"""The part of the pytest plugin that exists only with ``--chaos``: items, session, summary.

One `ChaosPlugin` per pytest process. Under xdist the controller checks the options and names the
scratch directory; every worker makes its own session in it, and the reference is shared.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest

from seatrial.chaos.errors import UsageError
from seatrial.chaos.session import Session
from seatrial.recovery.storage import is_url

from .items import Preflight, TrialItem
from .jobs.registry import BUNDLED
from .options import ChaosOptions, experiment, read_options, reshard_routes
from .preflight import bundled_trials, given_trials
from .progress import ProgressLine
from .rows import Row, rows_in
from .runner import TIMES, ChaosTrial, TrialRunner
from .summary import summary_lines

_ROOT, _BARE, _UNUSABLE = "seatrial_root", "seatrial_bare", "seatrial_unusable"


class ChaosPlugin:
    """Holds the session; registered by `seatrial.plugins.pytest_plugin`.

    Raises:
        pytest.UsageError: options that cannot be run (exit code 4).
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._worker: dict[str, Any] | None = getattr(config, "workerinput", None)
        try:
            self.options = read_options(config)
            self._planned = self._plan(self.options)
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
        if self._worker is None:
            self._bare = config.args_source is not pytest.Config.ArgsSource.ARGS
            self._root = Path(tempfile.gettempdir()) / f"seatrial-{os.getpid()}-{token_hex(4)}"
        else:
            self._bare = self._worker[_BARE]
            self._root = Path(self._worker[_ROOT])
        self._session: Session | None = None
        self._rows: list[Row] = []
        self._not_run: dict[str, list[str]] = {}
        self._times: list[str] = []
        self._unusable = ""
        self.runner = TrialRunner(self.options, self._open, ProgressLine(config))

    @staticmethod
    def _plan(options: ChaosOptions) -> list[Any]:
        shape, seed = experiment(options).shape, options.seed
        reshard = reshard_routes(options)
        if options.fault:
            return list(given_trials(options.fault, shape, seed=seed, reshard=reshard))
        extras = options.job not in BUNDLED
        return list(bundled_trials(shape, seed=seed, extras=extras, reshard=reshard))

    def _open(self) -> Session:
        if self._session is None:
            owner = self._worker["workerid"] if self._worker else "main"
            store = self.options.store
            self._session = Session(
                self._root,
                owner=f"{owner}-{os.getpid()}",
                stores=store if is_url(store) else Path(store).resolve() if store else None,
                powerloss=self.options.powerloss,
                disk=self.options.disk,
            )
        return self._session

    def chaos_trial(self, node: pytest.Item) -> ChaosTrial:
        """The fixture's value for one test."""
        return ChaosTrial(self.runner, node)

    def unusable(self, reason: str) -> None:
        """Remember that nothing can be proved about the job, and end the session."""
        self._unusable = reason
        if self._worker is None:
            said = "nothing can be proved about this job"
            pytest.exit(said, returncode=pytest.ExitCode.USAGE_ERROR)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        """A test that puts nothing on trial must not look like one that did, and pass."""
        yield
        given = getattr(item, "funcargs", {}).get("chaos_trial")
        if isinstance(given, ChaosTrial) and not given.called:
            message = "the test asks for chaos_trial and never calls it: nothing was put on trial"
            pytest.fail(message, pytrace=False)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Of the collected tests, a bare ``pytest --chaos`` keeps only those about chaos."""
        if self._bare:
            kept = [item for item in items if isinstance(item, TrialItem) or self._is_wanted(item)]
            if left_out := [item for item in items if item not in kept]:
                config.hook.pytest_deselected(items=left_out)
            items[:] = kept

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Put the pre-flight in front of what the session itself collects."""
        report = yield
        if isinstance(collector, pytest.Session) and (self._bare or self.options.fault):
            preflight = Preflight.from_parent(
                collector, name="chaos", nodeid="chaos", planned=self._planned, plugin=self
            )
            report.result = [preflight, *(report.result or [])]
        return report

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[_ROOT] = str(self._root)
        node.workerinput[_BARE] = self._bare

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self._unusable = self._unusable or getattr(node, "workeroutput", {}).get(_UNUSABLE, "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._rows += rows_in(report.user_properties)
            self._times += [text for title, text in report.sections if TIMES in title]
            if report.skipped and report.nodeid.startswith("chaos::"):
                why = report.longrepr[2] if isinstance(report.longrepr, (tuple, list)) else ""
                names = self._not_run.setdefault(str(why).removeprefix("Skipped: "), [])
                names.append(report.nodeid.removeprefix("chaos::"))

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None]:
        if self._session is not None:
            self._session.close()
        if self._worker is not None:
            self._config.workeroutput[_UNUSABLE] = self._unusable  # type: ignore[attr-defined]
        if self._unusable:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
        yield
        if self._worker is None:  # by now xdist's workers have ended too
            shutil.rmtree(self._root, ignore_errors=True)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._rows and self._config.option.verbose >= -1:
            terminalreporter.section("chaos")
            for row, line in summary_lines(self._rows, terminalreporter._tw.fullwidth):
                markup = {} if row is None else {"green" if row.passed else "red": True}
                terminalreporter.write_line(line, **markup)
            for why, not_run in self._not_run.items():
                line = f"not run, {why}: {', '.join(not_run)}"
                terminalreporter.write_line(line, yellow=True)
            if self._times and self._config.option.verbose >= 1:
                terminalreporter.section("times in ms: median / 90 % / most", "-")
                for text in self._times:
                    terminalreporter.write_line(text + "\n")
        if self._unusable:
            terminalreporter.write_line(f"ERROR: {self._unusable}", red=True)

    def _is_wanted(self, item: pytest.Item) -> bool:
        if self.options.fault:
            return False
        uses_fixture = "chaos_trial" in getattr(item, "fixturenames", ())
        return uses_fixture or item.get_closest_marker("chaos") is not None
