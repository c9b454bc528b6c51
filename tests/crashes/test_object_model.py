"""The model of an object store: which states it allows, seen by a recovery that looks at all."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from seatrial.chaos.crashes.explore import explore_objects
from seatrial.chaos.crashes.hearing import Messages
from seatrial.chaos.crashes.operations import Recording
from seatrial.chaos.crashes.requests import record_objects
from seatrial.chaos.errors import ChaosError
from seatrial.recovery.storage.generic import FsspecObjects
from seatrial.recovery.storage.objects import Objects


def requests(*ranks: Callable[[Any], None]) -> Recording:
    """``ranks`` write into a memory, in turn."""
    url = f"memory://{secrets.token_hex(8)}"
    objects = FsspecObjects(url, {}, single_writer=False)
    turn = threading.Semaphore(0)

    def save(number: int) -> Callable[[Messages], object]:
        def run(_: Messages) -> None:
            for _ in range(number):
                turn.acquire()
            ranks[number](objects)
            for _ in range(number + 1):
                turn.release()

        return run

    return record_objects(url, [save(number) for number in range(len(ranks))])


def seen(recording: Recording, *names: str) -> set[tuple[bytes | None, ...]]:
    found = set()

    def recover(objects: Objects) -> int:
        sizes = objects.sizes()
        found.add(tuple(objects.get(n, 99) if n in sizes else None for n in names))
        return 1

    explore_objects(recording, recover, old=1, new=1)
    return found


def test_of_two_clients_that_write_one_object_either_may_be_last() -> None:
    def writer(number: int) -> Callable[[Any], None]:
        def write(objects: Any) -> None:
            objects.put("a", b"%d" % number)
            objects.put(f"done{number}", b"")

        return write

    states = seen(requests(writer(0), writer(1)), "a", "done0", "done1")
    assert {a for a, *done in states if done == [b"", b""]} == {b"0", b"1"}
    assert {a for a, *done in states if done == [None, None]} == {None, b"0", b"1"}


def test_whoever_has_read_an_object_comes_after_whoever_wrote_it() -> None:
    def second(objects: Any) -> None:
        objects.get("a", 9)
        objects.put("a", b"1")
        objects.put("b", b"1")

    recording = requests(lambda objects: objects.put("a", b"0"), second)
    assert seen(recording, "a", "b") == {
        (None, None), (b"0", None), (b"1", None), (b"1", b"1")
    }  # fmt: skip


def test_what_was_answered_is_there_before_the_next_request_is_made() -> None:
    def write(objects: Any) -> None:
        objects.put("a", b"0")
        objects.put("b", b"0")

    recording = requests(write)
    assert seen(recording, "a", "b") == {(None, None), (b"0", None), (b"0", b"0")}


def test_an_upload_is_unfinished_until_the_object_is_there_whole() -> None:
    def write(objects: Any) -> None:
        sink = objects.upload("a", 2)
        sink.write_at(b"x", 0)
        sink.write_at(b"y", 1)
        sink.finish()

    recording = requests(write)
    states = set()

    def recover(objects: Objects) -> int:
        states.add((tuple(name for name, _ in objects.uploads()), tuple(objects.sizes().items())))
        return 1

    explore_objects(recording, recover, old=1, new=1)
    assert states == {((), ()), (("a",), ()), ((), (("a", 2),))}


@pytest.mark.parametrize("taken", [b"mine", b""])
def test_a_request_that_lands_late_replaces_nothing_if_it_must_be_new(taken: bytes) -> None:
    recording = requests(lambda objects: objects.create("a", b"theirs"))
    lost = Recording([recording.ranks[0][:1]])  # and its client dies unanswered

    def recover(objects: Objects) -> str:
        if not objects.create("a", taken):
            return "theirs"
        return "mine" if objects.get("a", 9) == taken else "replaced"

    found = explore_objects(lost, recover, old="mine", new="theirs", late=True)
    assert (found.counterexample, found.complete) == (None, True)
    assert set(found.outcomes) == {"mine", "theirs"}


def test_what_goes_past_the_recorder_is_refused() -> None:
    url = f"memory://{secrets.token_hex(8)}"

    def write(_: Messages) -> None:
        fsspec.filesystem("memory").pipe_file(f"{url.removeprefix('memory:/')}/x", b"1")

    with pytest.raises(ChaosError, match="x was written past the recorder"):
        record_objects(url, [write])


def test_a_directory_is_no_object_store(tmp_path: Path) -> None:
    with pytest.raises(ChaosError, match="is a directory; record what is done to it by `record`"):
        record_objects(str(tmp_path), [lambda _: None])
