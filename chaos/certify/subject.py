"""A place on trial, and what a question about it is.

Guarantees: everything is done below a new name of its own, and removed by `Subject.clean_up`.
Torch-free; used by the questions and by `seatrial.chaos.certify.suite`.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol

from seatrial.recovery.errors import CheckpointError
from seatrial.recovery.storage import Storage, is_url, open_storage
from seatrial.recovery.storage.objects import ObjectStorage

from ..errors import UsageError
from .certificate import Outcome
from .directory import DirectoryObjects

__all__ = ["Answer", "Guarantee", "Names", "Subject", "at_once", "open_subject"]

RACERS = 6
GET_MAX = 1 << 30


class Names(Protocol):
    """What the suite asks of a backend: a part of `seatrial.recovery.storage.objects.Objects`."""

    @property
    def url(self) -> str: ...
    def prove(self) -> None: ...
    def sizes(self, prefix: str = "") -> dict[str, int]: ...
    def get(self, name: str, bytes_max: int) -> bytes: ...
    def put(self, name: str, data: bytes) -> None: ...
    def create(self, name: str, data: bytes) -> bool: ...
    def delete(self, names: Sequence[str]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A place on trial: its objects seen by two clients, and the storage on top.

    ``restart`` kills the server with SIGKILL and starts it anew, if somebody can do that; ``made``
    are directories that were missing, the innermost first.
    """

    names: Names
    second: Names
    storage: Storage
    restart: Callable[[], None] | None = None
    made: tuple[Path, ...] = ()

    @property
    def client(self) -> Any:
        """The client for single S3 requests; None for other backends."""
        return getattr(self.names, "client", None)

    @property
    def is_directory(self) -> bool:
        return isinstance(self.names, DirectoryObjects)

    @property
    def notes(self) -> tuple[str, ...]:
        """What no question can find out about such a place."""
        if self.is_directory:
            return ("what a power cut leaves is the disk's word: see docs/power-loss.md",)
        if self.names.url.startswith("memory:"):
            return (
                "memory is seen by one process only, and gone with it: for tests, not for jobs",
            )
        if self.client is None:
            return ("large files are written through fsspec's file objects",)
        return (
            () if self.restart else ("that what is acknowledged is durable is the server's word",)
        )

    def clean_up(self) -> None:
        """Remove everything that was made."""
        if isinstance(self.names, DirectoryObjects):
            shutil.rmtree(self.names.root, ignore_errors=True)
            for made in self.made:
                with suppress(OSError):  # somebody else has begun to use it
                    made.rmdir()
            return
        with suppress(OSError):  # a server without uploads has none left
            for name, upload in getattr(self.names, "uploads", list)():
                self.names.abort(name, upload)  # type: ignore[attr-defined]
        self.names.delete(list(self.names.sizes()))


Answer = tuple[Outcome, str] | tuple[Outcome, str, Mapping[str, float]]


@dataclass(frozen=True)
class Guarantee:
    """One question of the suite."""

    name: str
    meaning: str
    needed: bool
    ask: Callable[[Subject], Answer]


def open_subject(
    url: str,
    *,
    options: Mapping[str, object] | None = None,
    restart: Callable[[], None] | None = None,
) -> Subject:
    """The place at ``url``, below a new name that is removed by `Subject.clean_up`.

    Raises:
        UsageError: it cannot be used at all: an unknown protocol, no such bucket, no permission.
    """
    place = f"{url.rstrip('/')}/certify-{token_hex(8)}"
    made: tuple[Path, ...] = ()
    try:
        open_storage(url, options=options)
        storages = [open_storage(place, options=options) for _ in range(2)]
        first, second = (_names(storage, place) for storage in storages)
        if isinstance(first, DirectoryObjects):
            made = tuple(path for path in first.root.parents if not path.exists())
        subject = Subject(
            names=first, second=second, storage=storages[0], restart=restart, made=made
        )
        first.sizes()
        try:
            first.put("hello", b"hello")
        except BaseException:
            with suppress(OSError, CheckpointError):
                subject.clean_up()
            raise
    except (OSError, CheckpointError) as error:
        raise UsageError(f"{url!r} cannot be certified: {error}") from None
    return subject


def _names(storage: Storage, place: str) -> Names:
    if isinstance(storage, ObjectStorage):
        return storage.objects
    root = Path(place.removeprefix("file://").removeprefix("local://")) if is_url(place) else place
    return DirectoryObjects(Path(root))


def at_once(work: Callable[[int], object], workers: int = RACERS) -> list[object]:
    """``work(number)`` in threads that start together; results or exceptions."""
    start = threading.Barrier(workers)

    def run(number: int) -> object:
        start.wait()
        try:
            return work(number)
        except Exception as error:
            return error

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(run, range(workers)))
