"""Nobody is left: every way a run can end, and every kind of process a rank can leave behind."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import IO, cast

import pytest

from seatrial.chaos.launch.launcher import LocalLauncher
from seatrial.chaos.launch.processes import descendants
from seatrial.chaos.launch.shared import Use
from seatrial.chaos.run import Run

SuperviseProgram = Callable[..., Run]


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def recorded_pids(run: Run, *kinds: str) -> list[int]:
    return [
        int(str(record["pid"]))
        for _, _, trace in run.traces()
        for record in trace
        if record["kind"] in kinds
    ]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that is bound to happen; the limit only ends a broken test."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"not in 60 s: {what}"
        time.sleep(0.02)


def test_children_and_orphaned_daemons_of_killed_ranks_die_with_them(
    supervise_program: SuperviseProgram,
) -> None:
    run = supervise_program("have_children", "kill rank=1 at=step:1/backward")
    pids = recorded_pids(run, "process", "child", "daemon")
    assert len(pids) == 6
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="calls exit(2) by its x86-64 number")
def test_a_process_whose_main_thread_is_gone_is_found_and_so_is_its_child() -> None:
    program = (
        "import ctypes, subprocess, sys, threading, time\n"
        "child = subprocess.Popen(['sleep', '3600'])\n"
        "threading.Thread(target=time.sleep, args=(3600,)).start()\n"
        "print(child.pid, flush=True)\n"
        "ctypes.CDLL(None).syscall(60, 0)\n"  # exit(2) of the calling thread alone, on x86-64
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            wait_until(lambda: not is_alive(process.pid), "the main thread is gone")
            assert {process.pid, child} <= set(descendants(os.getpid()))
        finally:
            process.kill()
            os.kill(child, signal.SIGKILL)


def test_what_outlives_a_killed_rank_is_not_called_a_stray(
    supervise_program: SuperviseProgram,
) -> None:
    run = supervise_program("have_children", "kill rank=1 at=step:1/backward")
    assert run.attempts[0].strays == ()


def test_a_process_that_outlives_ranks_that_left_by_themselves_is_a_stray_and_dies(
    supervise_program: SuperviseProgram,
) -> None:
    run = supervise_program("have_children", leave=True)
    assert run.completed
    assert sorted(run.attempts[0].strays) == ["sleep 3600"] * 2 + ["sleep 3601"] * 2
    assert not any(is_alive(pid) for pid in recorded_pids(run, "process", "child", "daemon"))


def test_a_helper_that_is_still_leaving_is_no_stray(supervise_program: SuperviseProgram) -> None:
    # multiprocessing's resource tracker outlives its process by a moment.
    run = supervise_program("share_memory_in_order")
    assert run.completed
    assert run.attempts[0].strays == ()


def test_an_answer_that_an_interrupt_left_unread_is_not_taken_for_the_next(
    launcher: LocalLauncher,
) -> None:
    launcher._control.sendall(
        b'{"do": "warm", "method": "fork", "modules": "", "number": "interrupted"}\n'
    )
    assert launcher.stop() == []


def test_an_interrupt_while_the_job_is_imported_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = tmp_path / "began"
    (tmp_path / "slow_import.py").write_text(
        "import os, time\n"
        f"with open({str(began)!r}, 'w') as file:\n    file.write(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def interrupt() -> None:
        wait_until(lambda: began.exists() and began.read_text() != "", "the import begins")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    # A shell starts what runs in the background with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            LocalLauncher(method="fork", scratch=[scratch], preload=["slow_import"])
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert not is_alive(int(began.read_text()))


def test_a_clean_run_leaves_no_stray_and_no_litter(
    supervise_program: SuperviseProgram, launcher: LocalLauncher
) -> None:
    (attempt,) = supervise_program("train").attempts
    assert (attempt.strays, attempt.litter) == ((), ())
    assert descendants(launcher._process.pid) == []


def test_temporary_files_and_shared_memory_are_found_and_removed(
    supervise_program: SuperviseProgram,
) -> None:
    run = supervise_program("litter")
    litter = run.attempts[0].litter
    files = [path for path in litter if "forgotten-" in path]
    segments = [path for path in litter if path.startswith("/dev/shm/torch_")]
    assert (len(files), len(segments), len(litter)) == (2, 2, 4)
    assert not any(Path(path).exists() for path in litter)


@pytest.mark.parametrize("preempted", [False, True])
def test_segments_of_children_and_whatever_a_rank_had_mapped_are_found_and_removed(
    supervise_program: SuperviseProgram, preempted: bool
) -> None:
    litter = supervise_program("forget_segments", preempted=preempted).attempts[0].litter
    kinds = sorted(Path(path).name.partition("_")[0] for path in litter)
    assert kinds == ["psm", "psm", "torch", "torch"]
    assert not any(Path(path).exists() for path in litter)


def test_a_segment_that_was_there_before_is_nobodys_litter(
    supervise_program: SuperviseProgram,
) -> None:
    segment = shared_memory.SharedMemory(create=True, size=64)
    segment.close()
    try:
        run = supervise_program("use_a_segment_of_others", name=segment.name)
        assert (run.completed, run.attempts[0].litter) == (True, ())
        assert Path("/dev/shm", segment.name).exists()
    finally:
        segment.unlink()


def test_shared_memory_of_other_processes_is_left_alone(
    supervise_program: SuperviseProgram,
) -> None:
    mine = Path(f"/dev/shm/torch_{os.getpid()}_mine")
    mine.write_text("x")
    try:
        run = supervise_program("litter")
        assert str(mine) not in run.attempts[0].litter
        assert mine.exists()
    finally:
        mine.unlink()


def test_an_exception_in_the_supervisor_leaves_no_rank(
    supervise_program: SuperviseProgram, launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def interrupt(*, timeout_s: float) -> None:
        seen.extend(descendants(launcher._process.pid))
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "exits", interrupt)
    with pytest.raises(KeyboardInterrupt):
        supervise_program("hang")
    assert len(seen) == 2
    assert not any(is_alive(pid) for pid in seen)


_SUPERVISOR = """
import os
import sys
import time
from pathlib import Path
from seatrial.chaos.launch.launcher import LocalLauncher
from seatrial.chaos.launch.shared import Use
from seatrial.chaos.launch.plan import Workload, World
from seatrial.chaos.run import StoreState
from seatrial.chaos.schedule import Schedule
from seatrial.chaos.supervisor import Assignment, Limits, supervise

scratch = Path(sys.argv[1])
shared = scratch.parent / "shared"
with LocalLauncher(method=sys.argv[2], scratch=[scratch], shared=shared) as launcher:
    if "forks" in sys.argv:  # who has the supervisor's end of the socket, too
        helper = os.fork()
        if helper == 0:
            time.sleep(600)
        (scratch.parent / "helper").write_text(str(helper))
    used = Use(shared)
    supervise(
        Assignment(
            workload=Workload(entry="rank_programs:have_children", arguments={}),
            world=World(ranks=2, topology="dp2", device="cpu"),
            schedule=Schedule(),
            seed=0,
            limits=Limits(max_restarts=0, silence_s=300.0, stopped_silence_s=300.0),
            store=str(scratch / "store"),
            directory=scratch / "run",
            inspect=lambda _: StoreState(),
        ),
        launcher,
    )
"""


@pytest.fixture
def supervisor(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[bytes], Path, list[int]]]:
    """A process that supervises ranks with children; its scratch; everybody below it, but for what
    it has forked itself."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = subprocess.Popen(
        [sys.executable, "-c", _SUPERVISOR, str(scratch), request.param, "forks"],
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,
    )
    helper = 0
    try:
        # The last thing that a rank does before it waits is its step.
        wait_until(
            lambda: len([t for t in scratch.glob("run/traces/*") if '"did"' in t.read_text()]) == 2,
            "both ranks train",
        )
        helper = int((tmp_path / "helper").read_text())
        yield process, scratch, [pid for pid in descendants(process.pid) if pid != helper]
    finally:
        for pid in filter(None, (process.pid, helper)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize(
    ("supervisor", "is_shared"), [("fork", True), ("torchrun", False)], indirect=["supervisor"]
)
def test_a_supervisor_killed_outright_leaves_no_process_and_no_scratch(
    supervisor: tuple[subprocess.Popen[bytes], Path, list[int]], is_shared: bool
) -> None:
    process, scratch, below = supervisor
    shared = scratch.with_name("shared")
    other = Use(shared)
    if not is_shared:
        other.end()
    assert len(below) >= 7  # the custodian, and for each rank itself, a child and a daemon
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in below), f"{below} are gone")
    wait_until(lambda: not scratch.exists(), "the scratch directory is gone")
    wait_until(lambda: shared.exists() == is_shared, "what was shared is left to who is left")
    other.end()


def test_ranks_die_with_a_killed_custodian(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = subprocess.Popen(
        [sys.executable, "-c", _SUPERVISOR, str(scratch), "spawn"],
        env=os.environ | {"PYTHONPATH": path},
        stderr=subprocess.PIPE,
    )
    below: list[int] = []
    try:
        wait_until(
            lambda: len([t for t in scratch.glob("run/traces/*") if '"did"' in t.read_text()]) == 2,
            "both ranks train",
        )
        below = descendants(process.pid)
        os.kill(below[0], signal.SIGKILL)
        _, errors = process.communicate()
        ranks = [int(file.read_text()) for file in scratch.glob("run/attempt1/rank*.pid")]
        assert len(ranks) == 2
        wait_until(lambda: not any(is_alive(pid) for pid in ranks), "the ranks are gone")
        assert b"LaunchError" in errors
    finally:
        for pid in [process.pid, *below[1:]]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        cast(IO[bytes], process.stderr).close()


@pytest.mark.parametrize(
    ("module", "words", "environment"),
    [
        ("torchrun_agent", ["no plan", "1"], {}),
        ("torchrun_worker", ["no plan"], {"SEATRIAL_AGENT": "1"}),
    ],
)
def test_a_cold_process_whose_parent_was_gone_before_it_could_look_dies_at_once(
    module: str, words: list[str], environment: dict[str, str]
) -> None:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = subprocess.run(
        [sys.executable, "-m", f"seatrial.chaos.launch.{module}", *words],
        env=os.environ | {"PYTHONPATH": path} | environment,
        stderr=subprocess.PIPE,
        check=False,
    )
    assert (process.returncode, process.stderr) == (-signal.SIGKILL, b"")


@pytest.mark.parametrize("module", ["torchrun_agent", "torchrun_worker"])
def test_a_cold_process_asks_to_die_with_its_parent_before_it_imports_torch(module: str) -> None:
    """Which takes seconds, in which nobody else would end it."""
    program = f"import sys, seatrial.chaos.launch.{module}; sys.exit('torch' in sys.modules)"
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, env=os.environ | {"PYTHONPATH": path}).returncode == 0
