"""An open file of a ``chaos::`` file system: every read, write and close is an operation.

Guarantees: what is written passes through `write`, and nothing is committed by the garbage
collector. A commit that is lost leaves no file, and of a multipart upload the parts that were sent.

Does not: give the descriptor of a file that is open for writing, past which its bytes could go.
Torch-free; made by `seatrial.chaos.storage.filesystem`.
"""

from __future__ import annotations

import io
from contextlib import suppress
from typing import Any

__all__ = ["ChaosFile"]


class ChaosFile(io.IOBase):
    """Wraps the open file ``inner`` of the file system that ``fs`` wraps."""

    def __init__(self, fs: Any, inner: Any, path: str, *, writable: bool) -> None:
        super().__init__()
        self.fs = fs
        self.inner = inner
        self.path = path
        self._writable = writable
        self._is_closed = False

    def readable(self) -> bool:
        return not self._writable

    def writable(self) -> bool:
        return self._writable

    def seekable(self) -> bool:
        return bool(self.inner.seekable())

    def tell(self) -> int:
        return int(self.inner.tell())

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self.inner.seek(offset, whence))

    def fileno(self) -> int:
        if self._writable:
            raise io.UnsupportedOperation("a chaos:: file that is written gives no descriptor")
        return int(self.inner.fileno())

    @property
    def size(self) -> Any:
        return getattr(self.inner, "size", None)

    def write(self, data: Any) -> int:
        length = memoryview(data).nbytes
        self.fs.perform("storage/write", self.path, self.inner.write, data, lost=length)
        return length

    def read(self, length: int = -1) -> bytes:
        at = self.tell()
        content: bytes = self.fs.perform(
            "storage/read", self.path, lambda _: self.inner.read(length), offset=at
        )
        return content

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        content = self.read(len(target))
        target[: len(content)] = content
        return len(content)

    def readinto1(self, buffer: Any) -> int:
        return self.readinto(buffer)

    def readline(self, size: int | None = -1) -> bytes:
        at = self.tell()
        limit = -1 if size is None else size
        content: bytes = self.fs.perform(
            "storage/read", self.path, lambda _: self.inner.readline(limit), offset=at
        )
        return content

    def flush(self, force: bool = False) -> None:
        if not self._is_closed:
            self.inner.flush()

    @property
    def closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._writable:
            self.fs.commit(self)
        else:
            self.inner.close()

    def lose(self) -> None:
        """Give the file up, although its writer is told that it was committed."""
        if hasattr(self.inner, "_upload_chunk"):  # an upload: what was sent is left unfinished
            self.inner.closed = True
            return
        self.inner.close()
        with suppress(FileNotFoundError):
            self.fs.fs.rm_file(self.path)

    def commit(self) -> None:
        """Of a transaction: fsspec calls it when the transaction ends."""
        self.fs.perform("storage/commit", self.path, lambda _: self.inner.commit())

    def discard(self) -> None:
        self.inner.discard()

    def __del__(self) -> None:
        pass  # IOBase would close, and so commit
