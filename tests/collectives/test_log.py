"""The log of calls: what is written survives, the newest are kept, what is there is read."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from seatrial.recovery.collectives.log import (
    DONE,
    HEADER_WORDS,
    NUMBER,
    RECORD_WORDS,
    UNDER_WAY,
    WAITED_FOR,
    read_calls,
)

from .written import WrittenLog


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank0.calls"


def named(path: Path, capacity: int = 8) -> WrittenLog:
    log = WrittenLog(path, capacity=capacity)
    log.name("group", 0, name="dp", ranks=[0, 3])
    log.name("call", 5, operation="all_reduce", shapes="4", size_bytes=16, site="a.py:1 in f")
    return log


def test_a_call_is_there_from_its_beginning(path: Path) -> None:
    log = named(path)
    number = log.begin(2.5, 0, 5, 7)
    (call,) = read_calls(path)
    assert (call.number, call.t, call.sequence, call.state) == (1, 2.5, 7, UNDER_WAY)
    assert (call.group, call.ranks, call.operation, call.size_bytes) == (
        "dp",
        (0, 3),
        "all_reduce",
        16,
    )
    assert read_calls(path)[0].seconds is None
    log.tell(number, 0.25)
    assert read_calls(path)[0].state == DONE
    assert read_calls(path)[0].seconds == 0.25
    log.close()


def test_the_newest_calls_are_kept_in_order(path: Path) -> None:
    log = named(path)
    for sequence in range(1, 21):
        log.begin(float(sequence), 0, 5, sequence)
    assert [call.sequence for call in read_calls(path)] == list(range(13, 21))
    log.close()


def test_a_call_that_is_waited_for_says_so(path: Path) -> None:
    log = named(path)
    first, second = (log.begin(float(n), 0, 5, n) for n in (1, 2))
    log.tell(second, WAITED_FOR)
    assert [call.sequence for call in read_calls(path) if call.is_waited_for] == [2]
    log.tell(second, 0.0)
    log.tell(first, WAITED_FOR)
    assert [call.sequence for call in read_calls(path) if call.is_waited_for] == [1]
    assert [call.sequence for call in read_calls(path) if not call.waits] == [2]
    log.close()


def test_a_killed_process_leaves_its_last_call(path: Path) -> None:
    child = os.fork()
    if child == 0:
        log = named(path)
        log.begin(1.0, 0, 5, 1)
        log.begin(2.0, 0, 5, 2)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert str(read_calls(path)[-1]) == ("all_reduce #2 of group dp (4) at a.py:1 in f, under way")


def test_a_record_that_a_kill_cut_short_is_not_the_newest(path: Path) -> None:
    log = named(path)
    for sequence in range(1, 11):
        log.begin(float(sequence), 0, 5, sequence)
    # The tenth call took the place of the second; its number is written last.
    log.words[HEADER_WORDS + 2 * RECORD_WORDS + NUMBER] = 2
    log.close()
    assert read_calls(path)[-1].sequence == 9


def test_no_log_has_no_calls(path: Path) -> None:
    assert read_calls(path) == []


@pytest.mark.parametrize("size", [0, 10, 200])
def test_a_log_that_was_cut_short_has_no_calls(path: Path, size: int) -> None:
    named(path).close()
    os.truncate(path, size)
    assert read_calls(path) == []


def test_a_name_that_was_cut_short_is_unknown(path: Path) -> None:
    log = named(path)
    log.begin(1.0, 0, 5, 1)
    log.close()
    os.truncate(path, path.stat().st_size - 4)
    assert read_calls(path)[0].operation == "?"
