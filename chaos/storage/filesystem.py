"""``chaos::`` in front of any URL that fsspec knows: operations become events, and faults strike.

    fsspec.open("chaos::file:///data/x", "wb"), "chaos::s3://bucket/run", "chaos::memory://x"

Guarantees: every primitive operation on the target is announced once, by the table of
`seatrial.chaos.events`; compound ones (recursive copies and deletions, a rename where the target
has none) are made of primitives, as fsspec makes them. Without faults the file system does what
its target does. It can be pickled, and is made anew in the process that uses it.

Does not: count the requests of one operation of the target (a large ``pipe_file`` is one write),
or cache. Faults come from the rank (`seatrial.chaos.storage.arming`), never from the URL.
Torch-free.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem, sync
from fsspec.core import get_filesystem_class, split_protocol
from fsspec.implementations.chained import ChainedFileSystem
from fsspec.implementations.local import LocalFileSystem

from seatrial.recovery.probe import perform, performer

from .arming import arm_from_environment
from .calls import EVENTS, OVERWRITING, Call
from .handle import ChaosFile
from .operations import Operations

__all__ = ["ChaosFileSystem"]

_ASYNC = tuple(name for name in EVENTS if name != "mv")
_FROM_FSSPEC = ("put_file", "get_file")  # of a target that is not asynchronous: open, read, write


class ChaosFileSystem(AsyncFileSystem, ChainedFileSystem):  # type: ignore[misc]
    """The file system ``fs``, or that of ``target_protocol``, with faults in front."""

    protocol = "chaos"
    cachable = False  # a cached instance would keep listings of another test

    def __init__(
        self,
        fo: str | None = None,
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        fs: Any = None,
        asynchronous: bool = False,
        **options: Any,
    ) -> None:
        options.pop("skip_instance_cache", None)
        if fs is None:
            chosen = dict(target_options or {})
            if asynchronous:
                chosen["asynchronous"] = True
            fs = fsspec.filesystem(target_protocol or "file", **chosen)
        self.fs = fs
        super().__init__(asynchronous=bool(fs.async_impl and fs.asynchronous), **options)
        self.async_impl = self.mirror_sync_methods = bool(_innermost(fs).async_impl)
        self._strip_protocol = self._stripped  # type: ignore[method-assign]
        self.root_marker = fs.root_marker
        arm_from_environment()

    # Names

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        text = os.fspath(path).removeprefix("chaos::").removeprefix("chaos://")
        protocol, _ = split_protocol(text)
        if protocol:
            return get_filesystem_class(protocol)._strip_protocol(text)
        return text.rstrip("/") if len(text) > 1 else text

    def _stripped(self, path: Any) -> Any:
        if isinstance(path, list):
            return [self._stripped(each) for each in path]
        text = os.fspath(path).removeprefix("chaos::").removeprefix("chaos://")
        return self.fs._strip_protocol(text)

    def unstrip_protocol(self, name: str) -> str:
        return f"chaos::{self.fs.unstrip_protocol(self._stripped(name))}"

    def _parent(self, path: str) -> str:
        return str(self.fs._parent(self._stripped(path)))

    @property
    def sep(self) -> str:
        return str(self.fs.sep)

    @property
    def fsid(self) -> str:
        return f"chaos_{self.fs.fsid}"

    @property
    def _intrans(self) -> bool:
        return bool(self.__dict__.get("_in_transaction", False))

    @_intrans.setter
    def _intrans(self, value: bool) -> None:
        self.__dict__["_in_transaction"] = value
        if "fs" in self.__dict__:
            self.fs._intrans = value  # memory:// looks there, and not at autocommit=

    def invalidate_cache(self, path: str | None = None) -> None:
        self.fs.invalidate_cache(path)

    def created(self, path: str) -> Any:
        return self.fs.created(path)

    def modified(self, path: str) -> Any:
        return self.fs.modified(path)

    # Performing

    def perform(
        self,
        event: str,
        file: str,
        do: Callable[[Any], Any],
        data: Any = None,
        *,
        lost: Any = None,
        **facts: object,
    ) -> Any:
        """Carry out one operation of a target that is not asynchronous, or of an open file."""
        return perform(event, do, data, lost=lost, file=file, **facts)

    def commit(self, file: ChaosFile) -> None:
        """Complete a file that was written."""
        operations = performer()
        if not isinstance(operations, Operations):
            file.inner.close()
            return
        operation = operations.begin("storage/commit", None, {"file": file.path})
        if operation is None:
            file.inner.close()
            return
        if operation.hold:
            operations.hold(operation, file.inner.close)
        elif operation.is_lost:
            file.lose()
        else:
            file.inner.close()
        operation.answer(None)
        for change in operation.changes_at_rest(possible=not operation.is_lost):
            self.fs.pipe_file(file.path, change(self.fs.cat_file(file.path)))
        operation.end()

    def _sync(self, name: str, *arguments: Any, **options: Any) -> Any:
        call = Call(self._stripped, name, arguments, options)
        if call.is_overwriting and (operations := _keeper(call.file)):
            with suppress(FileNotFoundError):
                operations.remember(call.file, self.fs.cat_file(call.file))
        method = getattr(self.fs, name)
        return perform(
            call.event, lambda data: method(*call.with_data(data), **options), call.data,
            lost=None, file=call.file, **call.facts,
        )  # fmt: skip

    async def _async(self, name: str, *arguments: Any, **options: Any) -> Any:
        call = Call(self._stripped, name, arguments, options)
        method = getattr(self.fs, f"_{name}")

        async def do(data: Any) -> Any:
            return await method(*call.with_data(data), **options)

        operations = performer()
        if not isinstance(operations, Operations):
            return await do(call.data)
        if call.is_overwriting and operations.keeps_versions(call.file):
            with suppress(FileNotFoundError):
                operations.remember(call.file, await self.fs._cat_file(call.file))
        operation = operations.begin(call.event, call.data, {"file": call.file, **call.facts})
        if operation is None:
            return await do(call.data)
        await _wait(operation.wait_s)
        result = None
        if operation.hold:
            loop = asyncio.get_running_loop()
            late = functools.partial(do, operation.content)
            operations.hold(operation, lambda: asyncio.run_coroutine_threadsafe(late(), loop))
        elif not operation.is_lost:
            result = await do(operation.content)
        result = operation.answer(result)
        await _wait(operation.wait_s)
        for change in operation.changes_at_rest(possible=name in OVERWRITING):
            content = await self.fs._cat_file(call.file)
            await self.fs._pipe_file(call.file, change(content))
        operation.end()
        return result

    # Operations that are not in the table

    def _open(self, path: str, mode: str = "rb", **options: Any) -> ChaosFile:
        path = self._stripped(path)
        if "r" in mode and "+" not in mode:
            inner = self.perform(
                "storage/stat", path, lambda _: self.fs._open(path, mode=mode, **options)
            )
            return ChaosFile(self, inner, path, writable=False)
        if operations := _keeper(path):
            with suppress(FileNotFoundError):
                operations.remember(path, self.fs.cat_file(path))
        inner = self.perform(
            "storage/create", path, lambda _: self.fs._open(path, mode=mode, **options)
        )
        return ChaosFile(self, inner, path, writable=True)

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        if isinstance(_innermost(self.fs), LocalFileSystem):
            self._sync("mv", path1, path2)
        else:  # as fsspec itself does: two operations, and a crash between them
            self.cp_file(path1, path2)
            self.rm_file(path1)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        if self.async_impl:
            sync(self.loop, self._rm, path, recursive=recursive, maxdepth=maxdepth)
            return
        for each in reversed(self.expand_path(path, recursive=recursive, maxdepth=maxdepth)):
            if self.fs.isdir(each):
                self.rmdir(each)
            else:
                self.rm_file(each)

    def rename(self, path1: str, path2: str, **options: Any) -> None:
        self.mv(path1, path2, **options)


def _keeper(file: str) -> Operations | None:
    operations = performer()
    if isinstance(operations, Operations) and operations.keeps_versions(file):
        return operations
    return None


async def _wait(seconds: float) -> None:
    if seconds:
        await asyncio.sleep(seconds)


def _innermost(fs: Any) -> Any:
    """DirFileSystem says that it is asynchronous even over a target that is not."""
    while getattr(fs, "fs", None) is not None and not isinstance(fs.fs, str):
        fs = fs.fs
    return fs


def _method(name: str) -> tuple[Callable[..., Any], Callable[..., Awaitable[Any]]]:
    inherited = getattr(fsspec.AbstractFileSystem, name)

    def plain(self: ChaosFileSystem, *arguments: Any, **options: Any) -> Any:
        if name in _FROM_FSSPEC and not self.async_impl:
            return inherited(self, *arguments, **options)
        return self._sync(name, *arguments, **options)

    async def asynchronous(self: ChaosFileSystem, *arguments: Any, **options: Any) -> Any:
        return await self._async(name, *arguments, **options)

    plain.__name__, asynchronous.__name__ = name, f"_{name}"
    return plain, asynchronous


for _name in _ASYNC:
    _plain, _asynchronous = _method(_name)
    setattr(ChaosFileSystem, _name, _plain)
    setattr(ChaosFileSystem, f"_{_name}", _asynchronous)
