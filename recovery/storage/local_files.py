"""The files of one attempt in a local or shared POSIX directory.

Guarantees: a file is created, never opened to be written again; no symlink in place of a file or of
its directory is followed, and only regular files are read; several threads write and read one file,
each at its own places. `fsync` is what makes content and names durable.

Does not: digest, or decode. Torch-free; made by `seatrial.recovery.storage.local`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import DamagedCheckpointError
from ..probe import perform
from ..publish import fsync_directory, naming, open_directory, open_regular
from ..writeback import preallocate, start_writeback
from .protocol import Buffer
from .retry import LOCAL, RetryPolicy

__all__ = ["LocalFiles"]

# Files that take one write need no reservation and no early writeback.
_SMALL_BYTES = 8 << 20
# A piece is still in the processor's cache when it is digested.
PIECE_BYTES = 256 << 10


@dataclass(frozen=True)
class LocalFiles:
    """The files in ``directory``."""

    directory: Path

    @property
    def retry(self) -> RetryPolicy:
        return LOCAL

    @property
    def fsyncs(self) -> bool:
        return True

    def path(self, name: str = "") -> str:
        return str(self.directory / name)

    @contextmanager
    def create(self, name: str, size_bytes: int) -> Iterator[LocalSink]:
        path = self.directory / name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = perform("storage/create", lambda _: os.open(path, flags, 0o644), file=str(path))
        try:
            yield LocalSink(file, path, size_bytes)
        finally:
            os.close(file)

    @contextmanager
    def open(self, name: str, size_bytes: int) -> Iterator[LocalSource]:
        path = self.directory / name
        with open_directory(path.parent) as directory:
            file = open_regular(directory, path.name)
        try:
            found = os.fstat(file).st_size
            if found != size_bytes:
                raise DamagedCheckpointError(
                    f"{path} has {found} bytes where {size_bytes} were stored"
                )
            yield LocalSource(file, path)
        finally:
            os.close(file)

    def fsync(self) -> None:
        fsync_directory(self.directory)


class LocalSink:
    """A file that is being written."""

    threads: int | None = None
    fsyncs = True

    def __init__(self, file: int, path: Path, size_bytes: int) -> None:
        self._file = file
        self._path = path
        self._size_bytes = size_bytes
        self._large = size_bytes > _SMALL_BYTES
        self._reserved = not self._large

    def write_at(self, data: Buffer, offset: int) -> None:
        if not self._reserved:
            # The first write is that of the header, by one thread.
            with naming(self._path):
                preallocate(self._file, self._size_bytes)
            self._reserved = True
        with naming(self._path):
            perform(
                "storage/write",
                lambda content: self._write(content, offset),
                data,
                file=str(self._path),
                offset=offset,
            )
        if offset:
            start_writeback(self._file, offset, len(data))

    def _write(self, data: Buffer, offset: int) -> None:
        rest, at = memoryview(data), offset
        while rest:  # however short single writes are
            done = os.pwrite(self._file, rest, at)
            rest, at = rest[done:], at + done

    def finish(self) -> None:
        size_bytes = os.fstat(self._file).st_size
        if size_bytes != self._size_bytes:
            raise OSError(f"{self._path} has {size_bytes} bytes instead of {self._size_bytes}")

    def fsync(self) -> None:
        with naming(self._path):
            perform("storage/sync", lambda _: os.fsync(self._file), file=str(self._path))


@dataclass(frozen=True)
class LocalSource:
    """A file that is being read."""

    file: int
    path: Path

    @property
    def piece_bytes(self) -> int:
        return PIECE_BYTES

    @property
    def threads(self) -> int | None:
        return None

    @property
    def gather_bytes(self) -> int:
        return 0

    def read_into(self, target: memoryview, offset: int) -> None:
        with naming(self.path):
            perform(
                "storage/read",
                lambda into: self._read(into, offset),
                target,
                file=str(self.path),
                offset=offset,
            )

    def _read(self, target: memoryview, offset: int) -> None:
        done = 0
        while done < len(target):
            count = os.preadv(self.file, [target[done:]], offset + done)
            if count == 0:
                raise DamagedCheckpointError(f"{self.path} ends at byte {offset + done}")
            done += count
