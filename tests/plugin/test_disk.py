"""``--chaos-disk``: what a user sees of a job that saves by its own code, on it and beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial.chaos.errors import UsageError
from seatrial.chaos.powerloss import check_kind

RunPytest = Callable[..., pytest.RunResult]


def test_the_report_says_what_a_fault_did_and_what_none_could_reach(
    pytester: pytest.Pytester, temporary: Path, run_pytest: RunPytest
) -> None:
    try:
        check_kind("fuse", "--chaos-disk")
    except UsageError as error:
        pytest.skip(str(error))
    (pytester.path / "test_jobs.py").write_text(
        f"""
SIZE = dict(steps=4, checkpoint_interval=2)
FULL = "fail rank=1 at=step:2/storage/write error=ENOSPC"

def test_on_the_disk(chaos_trial):
    chaos_trial(FULL, **SIZE)

def test_beside_it(chaos_trial):
    place = {str(pytester.path / "elsewhere")!r}
    chaos_trial(FULL, params=dict(mode="elsewhere", place=place), **SIZE)
"""
    )
    result = run_pytest(
        *("--chaos", "--chaos-disk=fuse", "--chaos-job=native_jobs:TorchSaveJob"),
        *("--chaos-device=cpu", "-p", "no:cacheprovider", "test_jobs.py"),
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*NOT_EXERCISED*never fired*wrote*/elsewhere/*where no fault of the storage can*",
            "*replay: *--chaos-disk fuse*",
            "*fail*RECOVERED * 2 *",
            "note: rank 0 wrote *",
        ]
    )
    assert list(temporary.iterdir()) == []
