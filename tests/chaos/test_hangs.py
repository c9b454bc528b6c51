"""When an attempt counts as hung before its deadline, and what is gathered of it.

What real calls of hanging ranks look like is in test_collectives.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, cast

import pytest

from seatrial.chaos import native_stacks as module
from seatrial.chaos import silence
from seatrial.chaos.ledger import Strike
from seatrial.chaos.native_stacks import native_stacks
from seatrial.chaos.run import Run
from seatrial.chaos.silence import Limits, Silence
from seatrial.chaos.stillness import Stillness
from seatrial.chaos.trace import TraceWriter

PROGRAM = """
import sys, time
print("ready", flush=True)
for line in sys.stdin:
    until = time.thread_time() + float(line)
    while time.thread_time() < until:
        pass
    print("done", flush=True)
"""


class Child:
    """A process that computes when it is told to, and otherwise waits for a line."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", PROGRAM]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.hears()

    @property
    def pid(self) -> int:
        return self.process.pid

    def hears(self) -> None:
        cast(IO[str], self.process.stdout).readline()
        self.awaits_state("S")

    def computes(self, seconds: float) -> None:
        cast(IO[str], self.process.stdin).write(f"{seconds}\n")
        cast(IO[str], self.process.stdin).flush()

    def stops(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.awaits_state("T")

    def awaits_state(self, state: str) -> None:
        stat = Path(f"/proc/{self.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != state:
            time.sleep(0.001)


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child()
    yield made
    made.process.kill()
    made.process.communicate()


def test_a_process_that_waits_is_still(child: Child) -> None:
    stillness = Stillness()
    assert [stillness.lasts_s([child.pid], now) for now in (10.0, 13.0, 15.0)] == [0.0, 3.0, 5.0]


def test_so_is_one_that_was_stopped(child: Child) -> None:
    child.stops()
    stillness = Stillness()
    assert [stillness.lasts_s([child.pid], now) for now in (10.0, 13.0)] == [0.0, 3.0]


def test_a_process_that_runs_or_could_run_is_not(child: Child) -> None:
    stillness = Stillness()
    stillness.lasts_s([child.pid], 10.0)
    child.computes(3600.0)
    deadline = time.monotonic() + 60.0
    while stillness.lasts_s([child.pid], 11.0) and time.monotonic() < deadline:
        pass  # it has not read the line yet
    assert [stillness.lasts_s([child.pid], now) for now in (12.0, 13.0, 9999.0)] == [0.0] * 3


def test_what_was_computed_between_two_looks_counts(child: Child) -> None:
    stillness = Stillness()
    stillness.lasts_s([child.pid], 10.0)
    child.computes(0.2)
    child.hears()
    assert stillness.lasts_s([child.pid], 11.0) == 0.0
    assert stillness.lasts_s([child.pid], 12.0) == 1.0


def test_processes_that_come_or_go_begin_it_anew(child: Child) -> None:
    other = Child()
    stillness = Stillness()
    stillness.lasts_s([child.pid], 10.0)
    assert stillness.lasts_s([child.pid, other.pid], 12.0) == 0.0
    assert stillness.lasts_s([child.pid, other.pid], 13.0) == 1.0
    other.process.kill()
    other.process.communicate()
    assert stillness.lasts_s([child.pid, other.pid], 14.0) == 0.0


def test_where_there_are_no_processes_nothing_is_known() -> None:
    stillness = Stillness()
    assert [stillness.lasts_s([], now) for now in (10.0, 9999.0)] == [0.0, 0.0]


def strike(action: str, *, resume: float | None = None) -> Strike:
    at = {"event": "forward", "edge": "before", "step": 3, "t": time.monotonic()}
    return Strike(fault=0, action=action, rank=1, attempt=1, resume=resume, **at)  # type: ignore[arg-type]


IsHang = Callable[..., bool]


@pytest.fixture
def is_hang(tmp_path: Path, child: Child, monkeypatch: pytest.MonkeyPatch) -> IsHang:
    """``is_hang(strikes)``: of one rank, whose process is the child, as soon as it can be told."""
    monkeypatch.setattr(silence, "_LOOK_S", 0.01)

    def ask(
        *strikes: Strike,
        began: bool = True,
        still_s: float | None = 0.001,
        last: Mapping[str, object] | None = None,
    ) -> bool:
        trace = TraceWriter(tmp_path / "trace")
        trace.record("process", pid=child.pid)
        if began:
            trace.record("began")
        if last is not None:
            trace.record(str(last["kind"]), **{k: v for k, v in last.items() if k != "kind"})
        trace.close()
        asked = Silence(
            [tmp_path / "trace"],
            Limits(max_restarts=0, silence_s=3600.0, stopped_silence_s=3600.0, still_s=still_s),
            lambda: [child.pid],
        )
        for _ in range(4):
            if asked.is_a_hang(strikes):
                assert asked.is_explained
                return True
            time.sleep(0.02)
        return False

    return ask


@pytest.mark.parametrize("action", ["stop", "drop", "skip"])
def test_ranks_that_must_hang_and_are_still_hang(is_hang: IsHang, action: str) -> None:
    assert is_hang(strike(action))


@pytest.mark.parametrize(
    "strikes",
    [
        [],
        [strike("stop", resume=0.5)],
        [strike("kill")],
        [strike("garble")],
        [strike("reorder")],  # held back for a while
        [strike("stop"), strike("delay", resume=5.0)],
        [strike("drop"), strike("fail")],  # which may be tried again after a while
    ],
    ids=lambda strikes: "+".join(each.action for each in strikes) or "nothing",
)
def test_otherwise_stillness_proves_nothing(is_hang: IsHang, strikes: list[Strike]) -> None:
    assert not is_hang(*strikes)


def test_neither_where_ranks_still_start(is_hang: IsHang) -> None:
    assert not is_hang(strike("stop"), began=False)


def test_nor_where_it_is_not_to_be_asked(is_hang: IsHang) -> None:
    assert not is_hang(strike("stop"), still_s=None)


LEAVING: list[dict[str, object]] = [
    {"kind": "event", "event": "exit", "edge": "before"},
    {"kind": "error", "type": "CollectiveMismatchError"},
    {"kind": "ended", "status": 3},
]


@pytest.mark.parametrize("last", LEAVING, ids=lambda last: str(last["kind"]))
def test_a_rank_that_leaves_is_given_its_time(
    is_hang: IsHang, child: Child, last: dict[str, object]
) -> None:
    assert not is_hang(strike("drop"), last=last)
    child.stops()
    assert is_hang(strike("drop"), last=last)


def test_a_rank_that_has_done_all_of_it_does_not_hang(is_hang: IsHang, child: Child) -> None:
    child.stops()
    assert not is_hang(strike("drop"), last={"kind": "ended", "status": 0})


def test_nor_while_a_process_is_at_work(is_hang: IsHang, child: Child) -> None:
    child.computes(3600.0)
    child.awaits_state("R")
    assert not is_hang(strike("stop"))


def test_native_stacks_name_what_a_process_waits_in(child: Child, tmp_path: Path) -> None:
    lines = native_stacks({3: child.pid}, tmp_path)
    assert lines[0] == "rank 3, native, newest frame first:"
    assert "read" in lines[1]
    whole = (tmp_path / "rank3.native").read_text()
    assert "in <module>" in whole


def test_a_stopped_process_has_native_stacks_and_stays_stopped(
    child: Child, tmp_path: Path
) -> None:
    child.stops()
    assert native_stacks({0: child.pid}, tmp_path)[0] == "rank 0, native, newest frame first:"
    child.stops()  # returns once it is


def test_what_is_not_to_be_had_is_said(
    child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    lines = native_stacks({1: child.pid}, tmp_path)
    assert lines[0].startswith("rank 1, no native stack: pystack is not installed")
    assert lines[1].startswith(f"    thread {child.pid} (python")
    assert ") S, in the kernel: " in lines[1]


def test_a_process_that_is_gone_has_no_stack(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    lines = native_stacks({1: gone.pid}, tmp_path)
    assert lines[0].startswith("rank 1, no native stack: pystack: ")
    assert lines[1:] == ("    the process is gone",)


def test_a_hang_that_no_fault_explains_is_looked_at_natively(
    supervise_program: Callable[..., Run],
) -> None:
    run = supervise_program(
        "hang", silence_s=4.0
    )  # ranks on a busy machine are silent while they start
    (attempt,) = run.attempts
    said = "\n".join(attempt.stacks)
    assert "rank 0, native, newest frame first:" in said
    assert "libtorch_cpu.so" in said
    directory = run.directory / "attempt1"
    assert "gloo" in (directory / "rank0.native").read_text()
    assert "flight recorder of rank(s) 0, 1: attempt1/flight-recorder/rank_*" in said
    records = (directory / "flight-recorder" / f"rank_{rank}" for rank in (0, 1))
    counts = [len(pickle.loads(path.read_bytes())["entries"]) for path in records]
    assert counts == [2, 1]  # the one with which a rank begins; rank 1 did not come to the other
    assert "rank 1 did not come to barrier #1" in attempt.cause
