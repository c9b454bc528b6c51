"""``pytest --chaos-certify PLACE``: each guarantee as a test, a table, and a certificate as JSON.

Guarantees: a guarantee that checkpoints need and that was not seen to be kept is a failed test;
what was not offered or not tried is a skipped one; nothing else is collected. Torch-free.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from seatrial.chaos.certify import Certificate, Observation, Outcome, Subject, open_subject
from seatrial.chaos.certify.subject import Guarantee
from seatrial.chaos.certify.suite import GUARANTEES, observe
from seatrial.chaos.errors import UsageError
from seatrial.recovery.errors import CheckpointError
from seatrial.recovery.storage.options import parse_options, resolved_options
from seatrial.recovery.storage.secret import refuse_secret_url


class CertifyPlugin:
    """Holds the place on trial; registered by `seatrial.plugins.pytest_plugin`.

    Raises:
        pytest.UsageError: the place cannot be used at all (exit code 4).
    """

    def __init__(self, config: pytest.Config) -> None:
        self._place = str(config.getoption("chaos_certify"))
        if not self._place.strip():
            raise pytest.UsageError(
                "--chaos-certify names no place; give a directory or URL (is a variable not set?)"
            )
        _refuse_secrets(self._place)
        artifacts = config.getoption("chaos_artifacts") or config.getini("chaos_artifacts") or ""
        name = re.sub(r"[^A-Za-z0-9.-]+", "-", self._place).strip("-")
        self._file = Path(artifacts or config.invocation_params.dir) / f"certificate-{name}.json"
        self._observed: list[Observation] = []
        self._subject: Subject | None = None
        self._unsaved = ""
        if config.getoption("numprocesses", default=None) or hasattr(config, "workerinput"):
            raise pytest.UsageError("--chaos-certify runs in one process; leave out -n")
        if config.getoption("collectonly"):
            return
        _require_writable(self._file.parent)
        given = config.getoption("chaos_store_option") or config.getini("chaos_store_option") or ()
        options = _resolved(given)
        try:
            self._subject = open_subject(self._place, options=options)
        except UsageError as error:
            raise pytest.UsageError(f"--chaos-certify {error}") from None

    def observe(self, guarantee: Guarantee) -> Observation:
        """Ask one question, and remember the answer."""
        assert self._subject is not None
        self._observed.append(observe(self._subject, guarantee))
        return self._observed[-1]

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        if not isinstance(collector, pytest.Session):
            return (yield)
        report = yield
        report.outcome, report.longrepr = "passed", None  # no test file is looked for
        report.result = [
            Suite.from_parent(collector, name="certify", nodeid="certify", plugin=self)
        ]
        return report

    @property
    def _certificate(self) -> Certificate:
        notes = self._subject.notes if self._subject else ()
        return Certificate(url=self._place, observations=tuple(self._observed), notes=notes)

    @property
    def _is_complete(self) -> bool:
        return {each.guarantee for each in self._observed} == {each.name for each in GUARANTEES}

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None]:
        if self._subject is not None:
            self._subject.clean_up()
            if self._is_complete:
                self._save(session)
        yield

    def _save(self, session: pytest.Session) -> None:
        try:
            self._certificate.save(self._file)
        except OSError as error:
            self._unsaved = f"it could not be saved: {error}"
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._observed:
            return
        terminalreporter.section(f"certificate of {self._place}")
        certificate = self._certificate
        if not self._is_complete:
            for line in certificate.table()[:-1]:
                terminalreporter.write_line(line)
            terminalreporter.write_line("not every guarantee was tried: no certificate", red=True)
            return
        *lines, verdict = certificate.table()
        for line in lines:
            terminalreporter.write_line(line)
        markup = {"green" if certificate.is_safe else "red": True}
        terminalreporter.write_line(verdict, **markup)
        said = self._unsaved or f"saved to {self._file}"
        terminalreporter.write_line(said, red=bool(self._unsaved))


def _resolved(texts: Sequence[str]) -> dict[str, object] | None:
    try:
        return resolved_options(parse_options(texts)) if texts else None
    except CheckpointError as error:
        raise pytest.UsageError(f"--chaos-store-option: {error}") from None


def _require_writable(directory: Path) -> None:
    """Before anything is asked, which takes its time."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(directory, os.W_OK) else "it may not be written"
    except OSError as error:
        problem = str(error)
    if problem:
        raise pytest.UsageError(
            f"--chaos-certify: the certificate cannot be saved in {str(directory)!r}: {problem}; "
            "name a directory by --chaos-artifacts"
        )


def _refuse_secrets(place: str) -> None:
    try:
        refuse_secret_url(place)
    except CheckpointError as error:
        raise pytest.UsageError(f"--chaos-certify: {error}") from None


class Suite(pytest.Collector):
    """The parent of all questions; its node id is ``certify``."""

    def __init__(self, *, plugin: CertifyPlugin, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._plugin = plugin

    def collect(self) -> Iterable[pytest.Item]:
        for guarantee in GUARANTEES:
            yield Question.from_parent(
                self,
                name=guarantee.name.replace(" ", "-"),
                guarantee=guarantee,
                plugin=self._plugin,
            )


class NotKeptError(Exception):
    """A guarantee that checkpoints need was not seen to be kept."""


class Question(pytest.Item):
    """One guarantee as a test; ``certify::exclusive-publish``."""

    def __init__(self, *, guarantee: Guarantee, plugin: CertifyPlugin, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._guarantee = guarantee
        self._plugin = plugin

    def runtest(self) -> None:
        found = self._plugin.observe(self._guarantee)
        if found.is_fatal:
            raise NotKeptError(f"{self._guarantee.meaning}: {found.evidence}")
        if found.outcome in (Outcome.NOT_OFFERED, Outcome.NOT_TRIED):
            pytest.skip(f"{found.outcome}: {found.evidence}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, NotKeptError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name
