from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

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

    def run(*arguments: str) -> pytest.RunResult:
        if arguments[:1] == ("tiny",):
            arguments = (*TINY, *arguments[1:])
        return pytester.runpytest_subprocess("-W", "error", *arguments, timeout=240)

    return run
