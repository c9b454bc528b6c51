"""Runs a save on every rank, each in a thread of this process, and records what it does to files.

Guarantees: the recorded operations, applied to what was there before, give exactly what is there
now; otherwise `record` raises, since something wrote past it (native code, another process) and no
state could be trusted. It raises as well if a thread of no rank, such as a helper of a save, has
changed or fsynced anything, even if nothing is left of that.

How ranks hear of each other is in `seatrial.chaos.crashes.hearing`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ChaosError
from .hearing import Hearing, Messages, Save
from .operations import Kind, Recording
from .watch import Call, Files, watching

__all__ = ["Messages", "contents", "record"]

_PATH_BYTES_MAX = 4096


def record(root: Path, saves: Sequence[Save]) -> Recording:
    """Run ``saves[rank](messages)`` for all ranks at once; what is in ``root`` is taken as durable.

    When a save returns, the rank acknowledges.

    Raises:
        ChaosError: a save failed, or wrote something that could not be seen, or in a thread of no
            rank.
    """
    recorder = _Recorder(root, len(saves))
    with watching(recorder.handle):
        recorder.run(saves)
    recorder.require_complete(root)
    return Recording(recorder.ranks, recorder.before, recorder.nodes_before)


def contents(root: Path) -> dict[str, bytes | None]:
    """Everything below ``root``: relative path to bytes, or None for a directory."""
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in sorted(root.rglob("*"))
    }


class _Recorder(Hearing):
    def __init__(self, root: Path, ranks: int) -> None:
        super().__init__(ranks)
        self.before = contents(root)
        self.nodes_before = {path: number for number, path in enumerate(self.before, start=1)}
        self._names = {"": 0, **self.nodes_before}
        self._bytes = {
            self.nodes_before[path]: bytearray(content)
            for path, content in self.before.items()
            if content is not None
        }
        self._nodes = len(self._names)
        self._files = Files(str(root))
        self._descriptors: dict[int, tuple[int, int]] = {}  # node and position

    def done(self, kind: Kind, **facts: Any) -> None:
        """Note what the thread's rank has done."""
        if self.rank is None:
            self.is_strange(f"{kind} {facts['path'] or '.'}")
        else:
            self.note(self.rank, kind, **facts)

    def require_complete(self, root: Path) -> None:
        self.require_no_strangers()
        seen = {
            path: bytes(self._bytes[node]) if node in self._bytes else None
            for path, node in self._names.items()
            if path
        }
        there = contents(root)
        if seen != there:
            paths = sorted(seen.keys() | there.keys())
            wrong = next(path for path in paths if seen.get(path, 0) != there.get(path, 0))
            raise ChaosError(
                f"{wrong} was written past the recorder (by native code or another process), so "
                "its crash states are not known"
            )

    # What a call of the same name does; the real call comes first.

    def handle(self, name: str, call: Call, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        method = getattr(self, f"on_{name}", None)
        if method is None or (self.rank is None and not self._is_below(args, options)):
            return call(*args, **options)
        with self.lock:
            return method(call, *args, **options)

    def _is_below(self, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Whether a call may be about something below the root."""
        return any(
            self._files.relative(value) is not None
            for value in (*args[:2], *options.values())
            if isinstance(value, int | str | os.PathLike)
            or (isinstance(value, bytes) and len(value) <= _PATH_BYTES_MAX)
        )

    def on_open(
        self, call: Call, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        descriptor: int = call(path, flags, mode, dir_fd=dir_fd)
        name = self._files.relative(path, dir_fd)
        if name is None:
            return descriptor
        if name not in self._names:
            node = self._add(name)
            self._bytes[node] = bytearray()
            self.done("create", path=name, node=node)
        elif flags & os.O_TRUNC:
            self._truncated(name, self._names[name], 0)
        node = self._names[name]
        self._files.opened[descriptor] = name
        end = len(self._bytes[node]) if flags & os.O_APPEND else 0
        self._descriptors[descriptor] = (node, end)
        return descriptor

    def on_open_file(self, call: Call, path: Any, mode: str, *args: Any, **options: Any) -> Any:
        if not set(mode) & set("wax+") or self._files.relative(path) is None:
            return call(path, mode, *args, **options)
        raw = _RecordedFile(self, path, mode)
        if options.get("buffering", args[0] if args else -1) == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        texts = {key: options[key] for key in ("encoding", "errors", "newline") if key in options}
        return io.TextIOWrapper(buffered, **texts)

    def on_close(self, call: Call, descriptor: int) -> None:
        call(descriptor)
        self.forget(descriptor)

    def forget(self, descriptor: int) -> None:
        self._descriptors.pop(descriptor, None)
        self._files.opened.pop(descriptor, None)

    def on_write(self, call: Call, descriptor: int, data: Any) -> int:
        count: int = call(descriptor, data)
        if descriptor in self._descriptors:
            self.wrote(descriptor, bytes(memoryview(data)[:count]), None)
        return count

    def on_pwrite(self, call: Call, descriptor: int, data: Any, offset: int) -> int:
        count: int = call(descriptor, data, offset)
        if descriptor in self._descriptors:
            self.wrote(descriptor, bytes(memoryview(data)[:count]), offset)
        return count

    def wrote(self, descriptor: int, data: bytes, offset: int | None) -> None:
        """``offset`` is None for a write at the descriptor's own position, which moves on."""
        node, position = self._descriptors[descriptor]
        if offset is None:
            offset = position
            self._descriptors[descriptor] = (node, position + len(data))
        content = self._bytes[node]
        content.extend(bytes(max(0, offset - len(content))))
        content[offset : offset + len(data)] = data
        name = self._files.opened[descriptor]
        self.done("write", path=name, node=node, offset=offset, data=data)

    def on_ftruncate(self, call: Call, descriptor: int, length: int) -> None:
        call(descriptor, length)
        if descriptor in self._descriptors:
            node, _ = self._descriptors[descriptor]
            self._truncated(self._files.opened[descriptor], node, length)

    def on_truncate(self, call: Call, path: Any, length: int) -> None:
        if isinstance(path, int):
            self.on_ftruncate(call, path, length)
            return
        call(path, length)
        if name := self._files.relative(path):
            self._truncated(name, self._names[name], length)

    def _truncated(self, name: str, node: int, length: int) -> None:
        content = self._bytes[node]
        content.extend(bytes(max(0, length - len(content))))
        del content[length:]
        self.done("truncate", path=name, node=node, offset=length)

    def on_fsync(self, call: Call, descriptor: int) -> None:
        call(descriptor)
        if descriptor in self._descriptors:
            node, _ = self._descriptors[descriptor]
            self.done("fsync", path=self._files.opened[descriptor], node=node)

    on_fdatasync = on_fsync

    def on_mkdir(
        self, call: Call, path: Any, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> None:
        call(path, mode, dir_fd=dir_fd)
        if name := self._files.relative(path, dir_fd):
            self.done("mkdir", path=name, node=self._add(name))

    def on_rmdir(self, call: Call, path: Any, *, dir_fd: int | None = None) -> None:
        call(path, dir_fd=dir_fd)
        if name := self._files.relative(path, dir_fd):
            self.done("rmdir", path=name, node=self._names.pop(name))

    def on_unlink(self, call: Call, path: Any, *, dir_fd: int | None = None) -> None:
        call(path, dir_fd=dir_fd)
        if name := self._files.relative(path, dir_fd):
            self.done("unlink", path=name, node=self._names.pop(name))

    on_remove = on_unlink

    def on_link(
        self,
        call: Call,
        source: Any,
        target: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        call(
            source,
            target,
            src_dir_fd=src_dir_fd,
            dst_dir_fd=dst_dir_fd,
            follow_symlinks=follow_symlinks,
        )
        old = self._files.relative(source, src_dir_fd)
        new = self._files.relative(target, dst_dir_fd)
        if old and new:
            self._names[new] = self._names[old]
            self.done("link", path=old, target=new, node=self._names[old])

    def on_rename(
        self,
        call: Call,
        source: Any,
        target: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
    ) -> None:
        call(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        old = self._files.relative(source, src_dir_fd)
        new = self._files.relative(target, dst_dir_fd)
        if not (old and new):
            return
        node = self._names[old]
        below = [name for name in self._names if name == old or name.startswith(f"{old}{os.sep}")]
        for name in below:
            self._names[new + name.removeprefix(old)] = self._names.pop(name)
        self.done("rename", path=old, target=new, node=node)

    on_replace = on_rename

    def _add(self, name: str) -> int:
        self._names[name] = self._nodes
        self._nodes += 1
        return self._names[name]


class _RecordedFile(io.FileIO):
    """What `open` makes for writing, with its writes recorded."""

    def __init__(self, recorder: _Recorder, path: Any, mode: str) -> None:
        self._recorder = recorder
        super().__init__(path, mode.replace("t", ""), opener=os.open)

    def write(self, data: Any) -> int:
        position = self.tell()
        count = super().write(data) or 0
        content = bytes(memoryview(data).cast("B")[:count])
        self._recorder.wrote(self.fileno(), content, position)
        return count

    def truncate(self, size: int | None = None) -> int:
        length = self.tell() if size is None else size
        self._recorder.on_ftruncate(os.ftruncate, self.fileno(), length)
        return length

    def close(self) -> None:
        if not self.closed:
            self._recorder.forget(self.fileno())
        super().close()
