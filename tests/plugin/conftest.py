from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import seatrial.plugins.session_plugin  # noqa: F401 - kept from one `configure_pytest` to the next

RunPytest = Callable[..., pytest.RunResult]

TINY = (
    *("--chaos", "--chaos-job=tiny_job:TinyJob", "--chaos-device=cpu"),
    *("--chaos-steps=8", "--chaos-checkpoint-interval=2"),
)


@pytest.fixture
def temporary(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where programs started by `run_pytest` put temporary files; empty if nothing is left."""
    directory = pytester.path / "temporary"
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    return directory


@pytest.fixture
def run_pytest(
    pytester: pytest.Pytester, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> RunPytest:
    """``run_pytest("--chaos", …)`` as a user would type it, in a process and directory of its own;
    warnings are errors. ``run_pytest("tiny", …)`` puts the tiny job on trial."""
    programs = Path(__file__).parents[1] / "programs"
    for directory in (programs, pytester.path):
        monkeypatch.setenv("PYTHONPATH", str(directory), prepend=os.pathsep)
    monkeypatch.setenv("COLUMNS", "160")
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)

    # With these set, pytest does not cut the lines of its summary, and all is printed twice.
    for name in ("CI", "BUILD_NUMBER"):
        monkeypatch.delenv(name, raising=False)

    # Its plugin imports the whole of hypothesis at the end of every session: 0.8 s for nothing.
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest")

    def run(*arguments: str) -> pytest.RunResult:
        if arguments[:1] == ("tiny",):
            arguments = (*TINY, *arguments[1:])
        return pytester.runpytest_subprocess("-W", "error", *arguments, timeout=240)

    return run


@pytest.fixture
def configure_pytest(pytester: pytest.Pytester, run_pytest: RunPytest) -> RunPytest:
    """As `run_pytest`, in this process: for sessions that end before anything is started."""

    def run(*arguments: str) -> pytest.RunResult:
        return pytester.runpytest_inprocess("-W", "error", *arguments)

    return run
