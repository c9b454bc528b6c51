"""The trace of a rank: what is recorded stays, what is torn is dropped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from seatrial.chaos.trace import TraceWriter, read_last, read_trace


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_records_come_back_in_order_with_kind_and_time(path: Path) -> None:
    writer = TraceWriter(path)
    writer.record("step", step=1)
    writer.record("event", event="data", step=2)
    writer.close()
    first, second = read_trace(path)
    assert (first["kind"], first["step"]) == ("step", 1)
    assert (second["kind"], second["event"]) == ("event", "data")
    assert first["t"] <= second["t"]  # type: ignore[operator]


def test_an_absent_trace_is_empty(path: Path) -> None:
    assert read_trace(path) == []
    assert read_last(path, "step") is None


def test_everything_recorded_before_a_sigkill_is_there(path: Path) -> None:
    program = (
        "import os, pathlib, signal, sys\n"
        "from seatrial.chaos.trace import TraceWriter\n"
        "writer = TraceWriter(pathlib.Path(sys.argv[1]))\n"
        "for number in range(100): writer.record('step', step=number)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [record["step"] for record in read_trace(path)] == list(range(100))


@pytest.mark.parametrize("lost", [1, 2, 10])
def test_a_torn_last_line_is_dropped(path: Path, lost: int) -> None:
    writer = TraceWriter(path)
    writer.record("step", step=1)
    writer.record("step", step=2)
    os.truncate(path, path.stat().st_size - lost)
    assert [record["step"] for record in read_trace(path)] == [1]
    last = read_last(path, "step")
    assert last is not None
    assert last["step"] == 1


def test_the_last_record_of_a_kind_is_found_behind_others(path: Path) -> None:
    writer = TraceWriter(path)
    writer.record("step", step=1)
    writer.record("step", step=2)
    writer.record("event", event="data")
    last = read_last(path, "step")
    assert last is not None
    assert last["step"] == 2


@pytest.mark.parametrize("window_bytes", [64, 100, 150, 1000])
def test_only_whole_records_in_the_window_are_looked_at(path: Path, window_bytes: int) -> None:
    writer = TraceWriter(path)
    for number in range(20):
        writer.record("step", step=number)
    last = read_last(path, "step", window_bytes=window_bytes)
    assert last is not None
    assert last["step"] == 19
    assert read_last(path, "other", window_bytes=window_bytes) is None


def test_two_writers_of_one_file_do_not_tear_each_others_records(path: Path) -> None:
    def write(name: str) -> None:
        writer = TraceWriter(path)
        for number in range(200):
            writer.record(name, step=number, filling="x" * 500)

    threads = [threading.Thread(target=write, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = read_trace(path)
    for name in ("a", "b"):
        assert [r["step"] for r in records if r["kind"] == name] == list(range(200))
