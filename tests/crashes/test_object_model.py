"""The model of an object store: which states it allows, seen by a recovery that looks at all."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

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


def by_a_helper(work: Callable[[], object]) -> None:
    helper = threading.Thread(target=work)
    helper.start()
    helper.join()


HELPED: dict[str, Callable[[Any], object]] = {
    "write lock": lambda objects: objects.put("lock", b"x"),
    "publish lock": lambda objects: objects.create("lock", b"x"),
    "delete lock": lambda objects: objects.delete(["lock"]),
    "create lock": lambda objects: objects.upload("lock", 1).abort(),
}


@pytest.mark.parametrize("name", HELPED)
def test_what_a_helper_thread_changed_is_refused_even_if_nothing_is_left_of_it(name: str) -> None:
    def save(objects: Any) -> None:
        if name == "delete lock":
            objects.put("lock", b"x")
        by_a_helper(lambda: HELPED[name](objects))
        objects.put("data", b"x")
        objects.delete(["lock"])

    with pytest.raises(ChaosError, match=f"a thread that is no rank's did {name}; which rank"):
        requests(save)


def test_an_upload_that_a_helper_thread_completes_is_refused() -> None:
    def save(objects: Any) -> None:
        sink = objects.upload("data", 1)
        sink.write_at(b"x", 0)
        by_a_helper(sink.finish)

    with pytest.raises(ChaosError, match="a thread that is no rank's did commit data"):
        requests(save)


def test_helper_threads_may_read_and_send_parts_of_an_upload() -> None:
    def save(objects: Any) -> None:
        sink = objects.upload("data", 1)
        by_a_helper(lambda: sink.write_at(b"x", 0))
        sink.finish()
        by_a_helper(lambda: (objects.sizes(), objects.get("data", 1)))

    (operations,) = requests(save).ranks
    assert [str(operation) for operation in operations if operation.kind == "put"] == [
        "begin an upload to data", "complete the upload of 1 bytes to data"
    ]  # fmt: skip


class Proving(MemoryFileSystem):  # type: ignore[misc]
    """Creates exclusively by its own word, as a store on the network does."""

    protocol = "proving"
    lock = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = super()._strip_protocol(path.removeprefix("proving://"))
        return stripped

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        with self.lock:
            if mode == "create" and self.exists(path):
                raise FileExistsError(path)
            super().pipe_file(path, value)


def test_a_file_system_may_prove_itself_by_a_race_of_threads() -> None:
    fsspec.register_implementation(Proving.protocol, Proving, clobber=True)
    place = f"proving://{secrets.token_hex(8)}"
    objects = FsspecObjects(place, {}, single_writer=False)

    def save(_: Messages) -> None:
        objects.prove()
        objects.put("data", b"x")

    (operations,) = record_objects(place, [save]).ranks
    assert [operation.path for operation in operations if operation.kind == "put"] == ["data"]


def test_a_directory_is_no_object_store(tmp_path: Path) -> None:
    with pytest.raises(ChaosError, match="is a directory; record what is done to it by `record`"):
        record_objects(str(tmp_path), [lambda _: None])
