"""A pytest process that is interrupted or killed leaves no process and no file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial.chaos.errors import UsageError
from seatrial.chaos.launch.processes import descendants
from seatrial.chaos.powerloss import check_kind

RunPytest = Callable[..., pytest.RunResult]


def require_kind(powerloss: str) -> None:
    try:
        check_kind(powerloss)
    except UsageError as error:
        pytest.skip(str(error))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that is bound to happen; the limit only ends a broken test."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"not in 120 s: {what}"
        time.sleep(0.02)


@pytest.mark.usefixtures("run_pytest")
@pytest.mark.parametrize(
    ("number", "powerloss"),
    [(signal.SIGKILL, ""), (signal.SIGINT, ""), (signal.SIGKILL, "fuse"), (signal.SIGKILL, "ext4")],
)
def test_a_pytest_process_that_is_ended_in_a_trial_leaves_nothing(
    pytester: pytest.Pytester, temporary: Path, number: signal.Signals, powerloss: str
) -> None:
    log = pytester.path / "built"
    store = pytester.path / "store"
    places, fault, steps = [f"--chaos-store={store}"], "clean", 1000
    if powerloss:
        require_kind(powerloss)
        places = [f"--chaos-powerloss={powerloss}"]
    if powerloss == "fuse":  # while a rank waits for the file system, which dies
        places, steps = [*places, "--chaos-disk=fuse"], 1
        fault = "delay rank=1 at=storage/create seconds=600"
    command = [
        *(sys.executable, "-m", "pytest", "--chaos", "-p", "no:xdist", "-p", "no:cacheprovider"),
        *("--chaos-job=tiny_job:TinyJob", f"--chaos-steps={steps}"),
        *("--chaos-param=pause_s=0.05", f"--chaos-param=log={log}", *places),
        f"--chaos-fault={fault}",
    ]
    process = subprocess.Popen(
        command,
        cwd=pytester.path,
        stdout=subprocess.DEVNULL,
        # A shell's background jobs ignore SIGINT, and so would this child of such a job.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_until(lambda: log.exists() and len(log.read_text().splitlines()) >= 2, "ranks run")
        if fault != "clean":
            struck = "*/main-*/trial1/strikes/fault0*.json"
            wait_until(lambda: any(temporary.glob(struck)), "a rank waits for its disk")
        below = descendants(process.pid)
        assert len(below) >= 3
        os.kill(process.pid, number)
        process.wait()
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in below), f"{below} are gone")
    wait_until(lambda: not list(temporary.iterdir()), "the temporary directory is empty")
    assert not store.exists() or not list(store.iterdir())
