"""File systems that fsspec knows: refused unless they prove that they create exclusively.

The file systems are small ones of this test, on top of fsspec's memory."""

from __future__ import annotations

import secrets
import threading
import time
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from seatrial.recovery import CheckpointStore, inspect_store
from seatrial.recovery.errors import AlreadyPublishedError, CheckpointError, SaveError

_lock = threading.Lock()


class Exclusive(MemoryFileSystem):  # type: ignore[misc]
    """Creates a file exclusively, as a server with a precondition does."""

    protocol = "exclusive"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        with _lock:
            if mode == "create" and self.exists(path):
                raise FileExistsError(path)
            super().pipe_file(path, value)


class Racy(MemoryFileSystem):  # type: ignore[misc]
    """Looks, is slow for a moment, and writes."""

    protocol = "racy"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        if mode == "create" and self.exists(path):
            raise FileExistsError(path)
        time.sleep(0.01)
        super().pipe_file(path, value)


class Deaf(MemoryFileSystem):  # type: ignore[misc]
    """Does not know of a mode, and takes no notice."""

    protocol = "deaf"

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        super().pipe_file(path, value)


class Plain(MemoryFileSystem):  # type: ignore[misc]
    """Has fsspec's own pipe_file, which looks and then writes."""

    protocol = "plainly"
    pipe_file = fsspec.AbstractFileSystem.pipe_file


class Listing(Exclusive):
    """Has fsspec's own find, which takes what it cannot list for empty; refuses ``refused``."""

    protocol = "listing"
    find = fsspec.AbstractFileSystem.find
    refused = "nothing"

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        if self.refused in path:
            raise PermissionError(13, "Permission denied", path)
        return super().ls(path, detail=detail)


@pytest.fixture(scope="module", autouse=True)
def known() -> None:
    for kind in (Exclusive, Racy, Deaf, Plain, Listing):
        fsspec.register_implementation(kind.protocol, kind, clobber=True)


def url(protocol: str) -> str:
    return f"{protocol}://{secrets.token_hex(8)}"


def test_one_that_creates_exclusively_is_used(make_state: Any, same_tensors: Any) -> None:
    location = url("exclusive")
    store = CheckpointStore(location)
    store.save(make_state(1), step=1)
    with pytest.raises(AlreadyPublishedError):
        CheckpointStore(location).save(make_state(2), step=1)
    state = make_state(0)
    assert CheckpointStore(location).restore(state) is not None
    assert same_tensors(state, make_state(1))
    assert inspect_store(location).leftovers == ()


@pytest.mark.parametrize(
    ("protocol", "cause"),
    [
        ("racy", "6 of 6 that created one name at once succeeded"),
        ("deaf", "6 of 6 that created one name at once succeeded"),
        ("plainly", "looks for the file and then writes it"),
    ],
)
def test_one_that_does_not_is_refused_in_one_sentence(
    make_state: Any, protocol: str, cause: str
) -> None:
    location = url(protocol)
    with pytest.raises(SaveError, match=cause) as caught:
        CheckpointStore(location).save(make_state(1), step=1)
    assert f"{location} cannot publish a checkpoint exactly once" in str(caught.value)
    assert "pass single_writer=True" in str(caught.value)
    assert CheckpointStore(location).latest() is None


@pytest.mark.parametrize("protocol", ["racy", "deaf", "plainly"])
def test_the_word_of_a_single_writer_is_taken(
    make_state: Any, same_tensors: Any, protocol: str
) -> None:
    location = url(protocol)
    store = CheckpointStore(location, single_writer=True)
    for step in (1, 2):
        store.save(make_state(step), step=step)
    with pytest.raises(AlreadyPublishedError):
        store.save(make_state(3), step=2)
    state = make_state(0)
    assert store.restore(state) is not None
    assert same_tensors(state, make_state(2))


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("nosuch://place", "Protocol not known: nosuch"),
        ("simplecache::s3://bucket/prefix", "without a chain"),
        ("s3://", "cannot hold checkpoints"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_at_once(location: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        CheckpointStore(location)


def test_a_file_url_is_the_directory(tmp_path: Any, make_state: Any) -> None:
    CheckpointStore(f"file://{tmp_path}/store").save(make_state(1), step=1)
    assert CheckpointStore(tmp_path / "store").latest() == 1


def test_a_url_is_no_directory() -> None:
    store = CheckpointStore("memory://somewhere")
    assert store.location == "memory://somewhere"
    with pytest.raises(CheckpointError, match="no directory"):
        _ = store.directory


def test_options_without_a_url_are_refused(tmp_path: Any) -> None:
    with pytest.raises(CheckpointError, match="storage_options are for URLs"):
        CheckpointStore(tmp_path, storage_options={"key": "value"})


@pytest.mark.parametrize("what", ["root", "step-00000002"])
def test_a_directory_that_cannot_be_listed_is_no_empty_one(
    make_state: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    location = url("listing")
    store = CheckpointStore(location)
    assert store.restore(make_state(0)) is None
    store.save(make_state(1), step=1)
    store.save(make_state(2), step=2)
    assert store.latest() == 2
    refused = location.removeprefix("listing://") if what == "root" else what
    monkeypatch.setattr(Listing, "refused", refused)
    with pytest.raises(OSError, match="Permission denied"):
        store.latest()
    with pytest.raises(CheckpointError, match="Permission denied"):
        store.restore(make_state(0))
    monkeypatch.undo()
    assert store.restore(make_state(0)).step == 2  # type: ignore[union-attr]
