"""Any other file system that fsspec knows, if it proves that it can create a file exclusively.

Guarantees: `FsspecObjects.create` is exclusive, because

- the file system is ``memory://``, which one process sees, and a lock keeps its threads apart;
- or a race at the first save showed it: several threads create the same name at once, again and
  again, and each time exactly one succeeds and its bytes are there;
- or the user said ``single_writer=True``: then nobody else creates it.

A file system whose ``pipe_file(mode="create")`` looks and then writes is refused without a race.

Does not: prove more than a race can, resume uploads, or know what is transient beyond `OSError`.
Torch-free; made by `seatrial.recovery.storage.open_storage`.
"""

from __future__ import annotations

import inspect
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ..errors import CheckpointError, DamagedCheckpointError, StorageUnsupportedError
from ..probe import perform
from .names import PROBE_PREFIX
from .protocol import Buffer
from .retry import REMOTE, is_transient, retried
from .secret import redacted

__all__ = ["FsspecObjects"]

RACES = 5
RACERS = 6
_memory_lock = threading.Lock()
_inherited: list[Any] = []  # a child must not close its parent's connections


class FsspecObjects:
    """The files below ``url``."""

    threads = 4

    def __init__(self, url: str, options: Mapping[str, object], *, single_writer: bool) -> None:
        self.url = url.rstrip("/")
        self._options = dict(options)
        self._single_writer = single_writer
        self._protocol = url.partition("://")[0]
        self._made_by = 0
        self._file_system: Any = None
        self._root = ""
        self._fs()  # an unknown protocol, or a missing package, is told at once

    def _fs(self) -> Any:
        """The file system of this process: many are not usable after a fork."""
        if self._made_by != os.getpid():
            import fsspec

            _inherited.append(self._file_system)

            try:
                self._file_system, root = fsspec.core.url_to_fs(
                    self.url, skip_instance_cache=True, **self._options
                )
            except OSError:
                raise
            except Exception as error:  # whatever a package makes of options that it does not know
                said = redacted(error, self._options)
                raise CheckpointError(f"{self.url} cannot hold checkpoints: {said}") from None
            self._root = root.rstrip("/")
            self._made_by = os.getpid()
        return self._file_system

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    # Publishing

    def prove(self) -> None:
        if self._single_writer or self._protocol == "memory":
            return
        cause = self._looks_then_writes() or self._lost_race()
        if cause:
            raise StorageUnsupportedError(
                f"{self.url} cannot publish a checkpoint exactly once ({cause}); if only one job, "
                "one attempt at a time, ever saves there, pass single_writer=True"
            )

    def _looks_then_writes(self) -> str | None:
        from fsspec import AbstractFileSystem

        kind = type(self._fs())
        own = getattr(kind, "_pipe_file", None) or kind.pipe_file
        if own is AbstractFileSystem.pipe_file:
            return "its pipe_file() looks for the file and then writes it"
        parameters = inspect.signature(own).parameters.values()
        if not any(p.name == "mode" or p.kind is p.VAR_KEYWORD for p in parameters):
            return "its pipe_file() has no mode"
        return None

    def _lost_race(self) -> str | None:
        for _ in range(RACES):
            name = f"{PROBE_PREFIX}{secrets.token_hex(8)}"
            start = threading.Barrier(RACERS)
            won: list[bytes] = []

            def race(number: int, name: str = name, start: Any = start, won: Any = won) -> None:
                content = b"%d" % number
                start.wait()
                with suppress(Exception):
                    self._pipe(name, content, "storage/publish", mode="create")
                    won.append(content)

            racers = [threading.Thread(target=race, args=(n,)) for n in range(RACERS)]
            for racer in racers:
                racer.start()
            for racer in racers:
                racer.join()
            try:
                if len(won) != 1:
                    return f"{len(won)} of {RACERS} that created one name at once succeeded"
                if self.get(name, 16) != won[0]:
                    return "the file of one that succeeded holds what another wrote"
            finally:
                self.delete([name])
        return None

    def create(self, name: str, data: bytes) -> bool:
        def use() -> bool:
            try:
                if self._protocol == "memory" or self._single_writer:
                    with _memory_lock:
                        if not self._fs().exists(self._path(name)):
                            self._pipe(name, data, "storage/publish")
                else:
                    self._pipe(name, data, "storage/publish", mode="create")
            except OSError as error:
                if not isinstance(error, FileExistsError) and not is_transient(error):
                    raise
                try:
                    return self._get(name, len(data) + 1) == data
                except FileNotFoundError:
                    raise error from None
            return self._get(name, len(data) + 1) == data

        return retried(use, REMOTE)

    # Everything else

    def _pipe(self, name: str, data: bytes, event: str = "storage/write", **mode: str) -> None:
        file_system, path = self._fs(), self._path(name)

        def pipe(content: bytes) -> None:
            try:
                file_system.pipe_file(path, content, **mode)
            except FileNotFoundError:
                file_system.makedirs(path.rpartition("/")[0], exist_ok=True)
                file_system.pipe_file(path, content, **mode)

        perform(event, pipe, data, file=f"{self.url}/{name}")

    def sizes(self, prefix: str = "") -> dict[str, int]:
        def use() -> dict[str, int]:
            file_system = self._fs()
            file_system.invalidate_cache()
            # The deepest directory that all of these are in.
            start = self._path(prefix).rpartition("/")[0]
            try:
                found: dict[str, Any] = perform(
                    "storage/list",
                    lambda _: _found(file_system, start),
                    file=f"{self.url}/{prefix}",
                )
            except FileNotFoundError:
                return {}
            names = {
                path.removeprefix(f"{self._root}/"): int(info["size"])
                for path, info in found.items()
            }
            return {name: size for name, size in names.items() if name.startswith(prefix)}

        return retried(use, REMOTE)

    def get(self, name: str, bytes_max: int) -> bytes:
        return retried(lambda: self._get(name, bytes_max), REMOTE)

    def _get(self, name: str, bytes_max: int) -> bytes:
        file_system = self._fs()
        file_system.invalidate_cache()
        content: bytes = perform(
            "storage/read",
            lambda _: file_system.cat_file(self._path(name)),
            file=f"{self.url}/{name}",
        )
        return content[:bytes_max]

    def read_into(self, name: str, offset: int, target: memoryview, size_bytes: int) -> None:
        def use() -> None:
            file_system = self._fs()
            if offset == 0:
                file_system.invalidate_cache()
                found = int(file_system.info(self._path(name))["size"])
                if found != size_bytes:
                    raise DamagedCheckpointError(
                        f"{self.url}/{name} has {found} bytes where {size_bytes} were stored"
                    )
            end = offset + len(target)
            path = self._path(name)
            part: bytes = perform(
                "storage/read",
                lambda _: file_system.cat_file(path, start=offset, end=end) if target else b"",
                file=f"{self.url}/{name}",
                offset=offset,
            )
            if len(part) != len(target):
                raise DamagedCheckpointError(f"{self.url}/{name} ends at byte {offset + len(part)}")
            target[:] = part

        retried(use, REMOTE)

    def put(self, name: str, data: bytes) -> None:
        retried(lambda: self._pipe(name, data), REMOTE)

    def upload(self, name: str, size_bytes: int) -> FsspecSink:
        return FsspecSink(self._fs(), self._path(name), f"{self.url}/{name}", size_bytes)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                retried(partial(self._delete, name), REMOTE)

    def _delete(self, name: str) -> None:
        path = self._path(name)
        perform("storage/delete", lambda _: self._fs().rm_file(path), file=f"{self.url}/{name}")

    def uploads(self) -> list[tuple[str, str]]:
        return []

    def abort(self, name: str, upload: str) -> None:
        pass


def _found(file_system: Any, start: str) -> dict[str, Any]:
    """The files below ``start``; raises `OSError` if some directory cannot be listed.

    fsspec's own `find` takes a directory that it cannot list for an empty one, and a store in which
    nothing is found for one in which nothing was ever saved.
    """
    from fsspec import AbstractFileSystem
    from fsspec.asyn import AsyncFileSystem

    kind = type(file_system)
    find = getattr(kind, "_find", None) or kind.find
    if find not in (AbstractFileSystem.find, AsyncFileSystem._find):
        found: dict[str, Any] = file_system.find(start, detail=True)
        return found
    found, directories = {}, [start]
    while directories:
        directory = directories.pop()
        try:
            entries = file_system.ls(directory, detail=True)
        except FileNotFoundError:
            continue  # deleted meanwhile, or nothing was ever saved
        for entry in entries:
            name = entry["name"].rstrip("/")
            if entry["type"] != "directory":
                found[name] = entry
            elif name != directory.rstrip("/"):
                directories.append(name)
    return found


class FsspecSink:
    """A file that is being written, in the order of its bytes."""

    threads: int | None = 1
    fsyncs = False

    def __init__(self, file_system: Any, path: str, url: str, size_bytes: int) -> None:
        self._url = url
        self._size_bytes = size_bytes
        self._position = 0

        def begin(_: None) -> Any:
            try:
                return file_system.open(path, "wb")
            except FileNotFoundError:
                file_system.makedirs(path.rpartition("/")[0], exist_ok=True)
                return file_system.open(path, "wb")

        self._stream = perform("storage/create", begin, file=url)

    def write_at(self, data: Buffer, offset: int) -> None:
        if offset != self._position:
            raise ValueError(f"{self._url} is written in order: {offset} after {self._position}")
        self._position += len(data)
        perform("storage/write", self._stream.write, bytes(data), file=self._url)

    def finish(self) -> None:
        if self._position != self._size_bytes:
            raise OSError(f"{self._url} has {self._position} bytes instead of {self._size_bytes}")
        perform("storage/commit", lambda _: self._stream.close(), file=self._url)

    def fsync(self) -> None:
        pass

    def abort(self) -> None:
        # Closing would publish the part that was written; it would be a leftover, but need not be.
        with suppress(Exception):
            self._stream.discard()
        with suppress(AttributeError):
            self._stream.closed = True
