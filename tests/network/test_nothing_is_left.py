"""Whatever is killed, no namespace, no link, no process and no file of the hosts stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from seatrial.chaos.launch.processes import descendants


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that is bound to happen; the limit only ends a broken test."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"not in 120 s: {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def namespaces(pids: list[int]) -> set[int]:
    """The network namespaces that these processes are in or hold open, but for this one's."""
    found = set()
    for pid in pids:
        for path in (Path(f"/proc/{pid}/ns/net"), *Path(f"/proc/{pid}/fd").glob("*")):
            try:
                if "net:[" in os.readlink(path):
                    found.add(path.stat().st_ino)
            except OSError:
                continue
    return found - {Path("/proc/self/ns/net").stat().st_ino}


def everybody() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


@pytest.fixture
def running(available: None, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A pytest in a trial on two hosts, and its temporary directory."""
    temporary, log = tmp_path / "temporary", tmp_path / "built"
    temporary.mkdir()
    programs = Path(__file__).parents[1] / "programs"
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    environment |= {"TMPDIR": str(temporary), "PYTHONPATH": str(programs)}
    command = [
        *(sys.executable, "-m", "pytest", "--chaos", "-p", "no:xdist", "-p", "no:cacheprovider"),
        *("--chaos-launcher=hosts", "--chaos-nodes=2", "--chaos-job=tiny_job:TinyJob"),
        *("--chaos-steps=1000", "--chaos-param=pause_s=0.05", f"--chaos-param=log={log}"),
        *("--chaos-fault=clean", f"--chaos-store={tmp_path / 'store'}"),
    ]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait_until(lambda: log.exists() and len(log.read_text().splitlines()) == 2, "ranks run")
        yield process, temporary
    finally:
        process.kill()
        process.wait()


def test_a_pytest_that_is_killed_leaves_nothing(
    running: tuple[subprocess.Popen[bytes], Path],
) -> None:
    process, temporary = running
    below = descendants(process.pid)
    assert len(below) >= 6  # the custodian, the switch, and for each host its agent and its rank
    made = namespaces(below)
    assert len(made) == 3  # of two hosts and the switch
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in below), f"{below} are gone")
    assert not made & namespaces(everybody())
    wait_until(lambda: not list(temporary.iterdir()), "the temporary directory is empty")


_CUSTODIAN = """
import sys, time
from pathlib import Path
from seatrial.chaos.network.process import SwitchProcess

directory = Path(sys.argv[1])
print(SwitchProcess(directory, directory / "network.jsonl", 2).pid, flush=True)
time.sleep(3600)
"""


@pytest.mark.usefixtures("available")
def test_the_switch_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _CUSTODIAN, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        switch = int(process.stdout.readline())
        try:
            made = namespaces([switch])
            assert len(made) == 3
        finally:
            process.kill()
    wait_until(lambda: not is_alive(switch), "the switch is gone")
    assert not made & namespaces(everybody())
