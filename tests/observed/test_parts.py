"""The parts of the disk that observes, each by itself: scars, handles, refusals, callers, audit."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from seatrial.chaos.observed.callers import Callers, is_dying, is_stopped
from seatrial.chaos.observed.handles import Handle, Refusals
from seatrial.chaos.observed.scars import Scar, Scars, difference
from seatrial.chaos.trace import read_trace

SCAR = Scar(fault=0, step=4, start=10, end=20)


@pytest.fixture
def scars() -> Scars:
    found = Scars()
    found.add(1, SCAR)
    return found


@pytest.mark.parametrize(
    ("start", "end", "size", "comes_upon_it"),
    [
        (0, 100, 100, True),
        (0, 11, 100, True),
        (19, 30, 100, True),
        (0, 10, 100, False),
        (20, 30, 100, False),
        (0, 5, 5, True),  # the bytes are missing, and it read to the end
        (0, 4, 5, False),
    ],
)
def test_a_scar_is_met_by_who_reads_it(
    scars: Scars, start: int, end: int, size: int, comes_upon_it: bool
) -> None:
    assert list(scars.read(1, start, end, size)) == [SCAR] * comes_upon_it
    assert list(scars.read(2, start, end, size)) == []


def test_a_scar_heals_when_all_of_it_is_written_anew(scars: Scars) -> None:
    scars.heal(1, 10, 19)
    assert list(scars.read(1, 0, 100, 100)) == [SCAR]
    scars.heal(1, 10, 20)
    assert list(scars.read(1, 0, 100, 100)) == []


def test_a_scar_goes_with_its_bytes_or_its_file(scars: Scars) -> None:
    scars.cut(1, 15)
    assert list(scars.read(1, 0, 100, 100)) == [SCAR]
    scars.cut(1, 10)
    assert list(scars.read(1, 0, 100, 100)) == []
    scars.add(1, SCAR)
    scars.removed(1)
    assert list(scars.read(1, 0, 100, 100)) == []


def test_a_file_that_should_be_there_is_missed_until_it_is(scars: Scars) -> None:
    scars.add_missing("/a", SCAR)
    assert scars.missed("/a") == [SCAR]
    scars.made("/a")
    assert scars.missed("/a") == []


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (b"abcdef", b"abXdef", (2, 3)),
        (b"abcdef", b"aXcdXf", (1, 5)),
        (b"abcdef", b"abc", (3, 6)),
        (b"", b"abc", (0, 3)),
        (b"abc", b"abc", (3, 3)),
    ],
)
def test_where_bytes_differ(before: bytes, after: bytes, expected: tuple[int, int]) -> None:
    assert difference(before, after)[0] == expected[0]
    if before != after:
        assert difference(before, after) == expected


def test_a_bit_that_was_read_wrongly_stays_wrong_for_the_handle() -> None:
    handle = Handle("/a", 0)
    assert handle.misread(100, b"abcd", b"aBcd") == b"aBcd"
    assert handle.misread(101, b"bcd", b"bcd") == b"Bcd"
    assert handle.misread(0, b"abcd", b"abcd") == b"abcd"
    assert Handle("/a", 0).misread(100, b"abcd", b"abcd") == b"abcd"


def test_a_reading_that_failed_fails_again_until_the_program_reads_anew() -> None:
    refusals, error = Refusals(), OSError(errno.EIO, "")
    refusals.note(7, 3, 100, 200, error)
    assert refusals.again(7, 3, 100) is error
    assert refusals.again(7, 3, 199) is error
    assert [refusals.again(7, 3, 200), refusals.again(7, 4, 100), refusals.again(8, 3, 100)] == [
        None,
        None,
        None,
    ]
    refusals.forget(7)
    assert refusals.again(7, 3, 100) is None


def test_threads_and_children_belong_to_who_joined_and_others_to_nobody() -> None:
    callers = Callers()
    callers.join(os.getpid(), 3)
    found: list[int | None] = []
    thread = threading.Thread(
        target=lambda: found.append(callers.rank_of(threading.get_native_id()))
    )
    thread.start()
    thread.join()
    with subprocess.Popen(["setsid", "sleep", "60"]) as child:
        found.append(callers.rank_of(child.pid))
        child.kill()
    assert found == [3, 3]
    assert callers.rank_of(1) is None
    assert callers.rank_of(child.pid) is None  # it is gone
    callers.forget()
    assert callers.rank_of(os.getpid()) is None


def test_who_is_stopped_or_killed_is_known() -> None:
    assert not is_dying(os.getpid())
    with subprocess.Popen(["sleep", "60"]) as child:
        assert not is_stopped(child.pid)
        child.send_signal(19)
        while not is_stopped(child.pid):
            pass
        child.kill()
    assert is_dying(child.pid)


def test_without_root_a_rank_notes_what_its_python_opens_elsewhere(tmp_path: Path) -> None:
    program = f"""
import os, pathlib
from seatrial.chaos.observed.audit import look_for_files
from seatrial.chaos.trace import TraceWriter
root = {str(tmp_path)!r}
look_for_files(TraceWriter(pathlib.Path(root, "trace")), ignored=(root + "/run",),
               holds=lambda file: file.startswith(root + "/disk/"))
for name in ("disk", "run", "other"):
    os.mkdir(os.path.join(root, name))
    with open(os.path.join(root, name, "file"), "w") as file:
        file.write("x")
    with open(os.path.join(root, name, "file")) as file:
        file.read()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    noted = [r["file"] for r in read_trace(tmp_path / "trace") if r["kind"] == "elsewhere"]
    assert noted == [str(tmp_path / "other" / "file")]
