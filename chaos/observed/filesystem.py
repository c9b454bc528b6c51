"""The file system that sees: every operation of every rank is announced, and faults strike at it.

Guarantees: an operation of a thread that belongs to a rank is performed as those of that rank's
own storage are, by the same faults and the same rules; its trace says what became of it. Reads by
``read`` reach it each time while a fault waits for them: the kernel's cache is turned away by a
time of modification that differs by nanoseconds. What is read through a mapping is seen when the
kernel fetches it, so a page that another rank has just fetched may not be; the trace says where a
rank opened a file and nothing of it was fetched for it.

Does not: see what was written elsewhere (`seatrial.chaos.observed.elsewhere`).

    python -m seatrial.chaos.observed.filesystem DIRECTORY MOUNTPOINT PARENT [power]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import mfusepy

from ..launch.processes import die_with_parent
from .handles import Handle
from .observing import Observing, caller


class _Attributes:
    """What is known of a file; a value of its own kind, so that a stale one is its absence."""

    def __init__(self, values: dict[str, int]) -> None:
        self.values = values


class ObservedFileSystem(Observing):
    """Every operation is announced, if a rank's, and then carried out as the faults would have it.

    How an operation of FUSE is called here: ``create``, also of a directory, a link, or a length;
    ``commit``, when a file that was written is closed; ``publish``, a hard link; ``stat``, whenever
    the kernel asks for what is not a directory by name.
    """

    # Looking

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        plain = super().getattr
        member = self._member()
        if member is None:
            return super().getattr(path, fh)
        thread = caller()
        if fh:
            self._refusals.forget(thread)
            return self._ticked(member, path, super().getattr(path, fh))
        if self._looked.pop(thread, None) == path or self._is_directory(path):
            found = super().getattr(path)  # asked once more by the kernel, or only on the way
        elif error := self._refusals.of_name(thread, path):
            raise error
        else:
            try:
                found = self._perform(
                    member, "stat", path, lambda _: _Attributes(plain(path))
                ).values
            except OSError as failed:
                if os.path.lexists(self._live / path[1:]):
                    self._refusals.note_name(thread, path, failed)
                raise
            self._looked[thread] = path
        return self._ticked(member, path, found)

    def readdir(self, path: str, fh: int) -> list[str]:
        plain = super().readdir

        member = self._member()
        if member is None:
            return plain(path, fh)
        own, above, *_ = plain(path, fh)  # which no program is told of
        names = self._perform(member, "list", path, lambda _: plain(path, fh)[2:])
        with self._lock:
            self._content.listed(member, self._root, path)
        return [own, above, *names]

    # Files

    def open(self, path: str, flags: int) -> int:
        plain = super().open
        member = self._member()
        if flags & os.O_ACCMODE == os.O_RDONLY:
            handle = super().open(path, flags)
            rank = None if member is None else member.rank
            self._handles[handle] = Handle(path, rank, is_unread=True)
            if member is not None and not os.fstat(handle).st_size:  # nothing will be read of it
                with self._lock:
                    self._content.met(member, self._root + path, handle, 0, 1)
            return handle
        is_cut = bool(flags & os.O_TRUNC)

        def do(_: object) -> int:
            with self._lock:
                if is_cut:
                    self._content.replaced(path, self._crew, self._root)
                handle = plain(path, flags)
                if is_cut:
                    self._content.cut(handle, 0)
                return handle

        return self._opened(member, path, do, is_written=is_cut)

    def create(self, path: str, mode: int, fi: object = None) -> int:
        plain = super().create

        def do(_: object) -> int:
            with self._lock:
                handle = plain(path, mode)
                self._content.made(path)
                return handle

        return self._opened(self._member("create", path), path, do, is_written=True)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        plain = super().read
        handle = self._handles[fh]
        path = path or handle.path
        right: list[bytes] = []

        def do(_: object) -> bytes:
            right.append(plain(path, size, offset, fh))
            return right[0]

        member = self._member(fh=fh)
        if member is None:
            return do(None)
        handle.is_unread = False
        if error := self._refusals.again(caller(), fh, offset):
            member.trace.record("told", file=self._root + path)
            raise error
        try:
            found: bytes = self._perform(member, "read", path, do, offset=offset, handle=fh)
        except OSError as failed:
            self._refusals.note(caller(), fh, offset, offset + size, failed)
            raise
        with self._lock:
            self._content.met(member, self._root + path, fh, offset, offset + size)
        return handle.misread(offset, right[0], found[:size])

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        plain = super().write
        handle = self._handles[fh]
        handle.is_written = True
        path = path or handle.path
        done: list[int] = []

        def do(content: bytes, at: int = fh) -> None:
            with self._lock:
                written = plain(path, content, offset, at)
                self._content.wrote(at, offset, offset + written)
                if content is data:
                    done.append(written)

        def later(content: bytes) -> Callable[[], object]:
            end = offset + len(content)
            return self._content.held(fh, lambda copy: do(content, copy), offset, end)

        member = self._member("write", path, fh)
        if member is None:
            do(data)
        else:
            with self._lock:
                self._content.written_in(fh, member)
            self._perform(
                member, "write", path, do, data, offset=offset, handle=fh, late=later, asked=data
            )
        return done[0] if done else len(data)  # whatever became of it, it is acknowledged

    def flush(self, path: str, fh: int) -> int:
        handle = self._handles.get(fh)
        if handle is not None and handle.is_written:
            handle.is_written = False
            member = self._member(fh=fh)
            if member is not None:
                path = path or handle.path
                operations = member.operations.of(caller())
                with self._tried(member, "storage/commit", self._root + path, handle):
                    self._content.commit(member, operations, self._root, path, self._lock)
        return 0

    def release(self, path: str, fh: int) -> int:
        handle = self._handles.pop(fh)
        member = None if handle.rank is None else self._crew.at(handle.rank)
        if member is not None and handle.is_unread and os.fstat(fh).st_size:
            file = self._root + handle.path
            if member.operations.waits("storage/read", file):
                member.trace.record("unread", file=file)
        return super().release(path, fh)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        plain = super().truncate

        def do(_: object) -> int:
            with self._lock:
                done = plain(path, length, fh)
                self._content.cut(fh or self._live / path[1:], length)
                return done

        return self._change("create", path, do, fh=fh)

    def fallocate(self, path: str, mode: int, offset: int, length: int, fh: int) -> int:
        with self._lock:
            return super().fallocate(path, mode, offset, length, fh)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        path = path or self._handles[fh].path
        return self._change("sync", path, self._locked("fsync", path, datasync, fh), fh=fh)

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        return self._change("sync", path, self._locked("fsyncdir", path, datasync, fh))

    # Names

    def mkdir(self, path: str, mode: int) -> int:
        return self._change("create", path, self._locked("mkdir", path, mode))

    def symlink(self, target: str, source: str) -> int:
        return self._change("create", target, self._locked("symlink", target, source))

    def rename(self, old: str, new: str, *_: object) -> int:
        plain = super().rename

        def do(_: object) -> int:
            with self._lock:
                self._content.replaced(new, self._crew, self._root)
                replaced = self._last_name(new)
                done = plain(old, new)
                self._content.removed(replaced)
                self._content.moved(old, new)
                self._content.made(new)
                return done

        return self._change("rename", new, do)

    def link(self, target: str, source: str) -> int:
        plain = super().link

        def do(_: object) -> int:
            with self._lock:
                done = plain(target, source)
                self._content.made(target)
                return done

        return self._change("publish", target, do, asked=target)

    def _remove(self, call: Callable[[Path], None], path: str) -> int:
        plain = super()._remove

        def do(_: object) -> int:
            with self._lock:
                removed = self._last_name(path)
                done = plain(call, path)
                self._content.removed(removed)
                self._content.gone(path)
                return done

        return self._change("delete", path, do)

    def _locked(self, name: str, *arguments: object) -> Callable[[object], int]:
        method = getattr(super(), name)

        def do(_: object) -> int:
            with self._lock:
                return int(method(*arguments))

        return do


def main() -> None:
    directory, mountpoint, parent, *power = sys.argv[1:]
    die_with_parent(int(parent))
    mfusepy.FUSE(
        ObservedFileSystem(Path(directory), mountpoint, loses_power=bool(power)),
        mountpoint,
        foreground=True,
        fsname="seatrial",
        subtype="seatrial",
        auto_unmount=True,  # whatever ends this process
    )


if __name__ == "__main__":
    main()
