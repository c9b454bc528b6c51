"""The file system that sees: every operation of every rank is announced, and faults strike at it.

Guarantees: an operation of a thread that belongs to a rank is performed as those of that rank's
own storage are, by the same faults and the same rules; its trace says what became of it. Reads by
``read`` reach it each time while a fault waits for them: the kernel's cache is turned away by a
time of modification that differs by nanoseconds. What is read through a mapping is seen when the
kernel fetches it, so a page that another rank has just fetched may not be; the trace says where a
rank opened a file and nothing of it was fetched for it.

Does not: see what was written elsewhere (`seatrial.chaos.observed.elsewhere`). An operation of a
process that belongs to no rank is carried out, and noted if it changes anything.

    python -m seatrial.chaos.observed.filesystem DIRECTORY MOUNTPOINT PARENT [power]
"""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import mfusepy

from ..launch.processes import command_line, die_with_parent
from ..powerloss.filesystem import PowerFileSystem
from . import control
from .content import Content
from .crew import Crew, Member
from .elsewhere import Elsewhere
from .scars import difference

_FLIPPED_MOST = 8  # bytes; what is longer is another version of the file
_CHANGES = ("create", "write", "rename", "publish", "delete")


@dataclass
class _Handle:
    """An open file. ``rank`` opened it; ``is_written``: since it was last closed; ``is_unread``: it
    was opened to be read, and nothing of it has been fetched; ``flips``: bytes that read wrongly,
    by position, and which bits of them."""

    path: str
    rank: int | None
    is_written: bool = False
    is_unread: bool = False
    flips: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Refusal:
    """A reading that failed, of which the kernel may only have thought that it would be needed."""

    handle: int
    start: int
    end: int
    error: OSError


class _Attributes:
    """What is known of a file; a value of its own kind, so that a stale one is its absence."""

    def __init__(self, values: dict[str, int]) -> None:
        self.values = values


class ObservedFileSystem(PowerFileSystem):
    """Operations on ``directory/live``, mounted on ``root``. Several threads."""

    def __init__(self, directory: Path, root: str, *, loses_power: bool) -> None:
        super().__init__(directory, loses_power=loses_power)
        self._root = root
        self._crew = Crew()
        self._content = Content(self._live, directory / "held")
        self._lock = threading.RLock()  # one operation at a time; none is held while one waits
        self._handles: dict[int, _Handle] = {}
        self._looked: dict[int, str] = {}  # by thread, what it has just looked up
        self._refused: dict[int, _Refusal] = {}  # by thread, the reading that has just failed
        self._strangers: set[int] = set()
        self._ticks = count()
        self._elsewhere = Elsewhere(self._crew, ignored=(str(directory), root))

    # What it is told; see `seatrial.chaos.observed.control`

    def setxattr(self, path: str, name: str, value: bytes, *flags: object) -> int:
        thread, text = _caller(), bytes(value).decode()
        if name == control.RANK:
            self._join(thread, path, text)
        elif name == control.PARTING:
            self._elsewhere.drain()
            self._crew.part()
            self._content.part()
        elif name in (control.STEP, control.CONTENT, control.END):
            member = self._crew.of(thread)
            if member is None:
                return 0  # nothing waits for it here
            if name == control.STEP:
                member.injector.at_step(int(text))
            elif name == control.CONTENT:
                member.is_content = True
            else:
                member.operations.close()
        else:
            with self._lock:
                return super().setxattr(path, name, value, *flags)
        return 0

    def getxattr(self, path: str, name: str, *more: object) -> bytes:
        if name == control.ROOT:
            return os.fsencode(self._root)
        if name == control.RANK:
            return b"watched" if self._elsewhere.is_watching else b"audit"
        return super().getxattr(path, name, *more)

    def _join(self, thread: int, path: str, plan: str) -> None:
        store = str(self._live / path[1:])
        member = self._crew.join(plan, thread, store=store, cut=self._cut_now)
        member.operations.told = lambda operation: self._content.told(operation, member)
        member.operations.step_of = lambda event, file: self._content.step_of(event, file, member)
        member.trace.record("disk", root=self._root, watched=self._elsewhere.is_watching)

    def _cut_now(self, survives: Any) -> None:
        with self._lock:
            self.cut(survives)

    # Operations

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        plain = super().getattr
        member = self._member()
        if member is None:
            return super().getattr(path, fh)
        thread = _caller()
        if fh:
            self._refused.pop(thread, None)  # the program itself reads anew
            return self._ticked(member, path, super().getattr(path, fh))
        if self._looked.pop(thread, None) == path or self._is_directory(path):
            found = super().getattr(path)  # asked once more by the kernel, or only on the way
        else:
            found = self._perform(member, "stat", path, lambda _: _Attributes(plain(path))).values
            self._looked[thread] = path
        return self._ticked(member, path, found)

    def readdir(self, path: str, fh: int) -> list[str]:
        plain = super().readdir

        def do(_: object) -> list[str]:
            return [name for name in plain(path, fh) if name[0] != "."]

        member = self._member()
        listed = super().readdir(path, fh)
        if member is None:
            return listed
        hidden = [name for name in listed if name[0] == "."]
        return hidden + list(self._perform(member, "list", path, do))

    def open(self, path: str, flags: int) -> int:
        plain = super().open
        member = self._member()
        if flags & os.O_ACCMODE == os.O_RDONLY:
            handle = super().open(path, flags)
            rank = None if member is None else member.rank
            self._handles[handle] = _Handle(path, rank, is_unread=True)
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
        self._pass_on(member, path, offset, fh)
        try:
            found: bytes = self._perform(member, "read", path, do, offset=offset, handle=fh)
        except OSError as error:
            self._refused[_caller()] = _Refusal(fh, offset, offset + size, error)
            raise
        with self._lock:
            self._content.met(member, self._root + path, fh, offset, offset + size)
        return _misread(handle, offset, right[0], found[:size])

    def _pass_on(self, member: Member, path: str, offset: int, fh: int) -> None:
        """Fail once more where a reading has failed: the kernel swallows the error of what it reads
        ahead, and asks again for what the program really needs."""
        before = self._refused.get(_caller())
        if before is not None and before.handle == fh and before.start <= offset < before.end:
            del self._refused[_caller()]
            member.trace.record("told", file=self._root + path)
            raise before.error

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
            return self._content.held(fh, lambda copy: do(content, copy))

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
                operations = member.operations.of(_caller())
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
                return done

        return self._change("delete", path, do)

    # How they are performed

    def _member(self, change: str = "", path: str = "", fh: int | None = None) -> Member | None:
        """Whose operation it is; what the kernel writes by itself is whose file it is."""
        if not self._crew:
            return None
        thread = _caller()
        if thread == 0:
            rank = self._handles[fh].rank if fh in self._handles else None
            return None if rank is None else self._crew.at(rank)
        member: Member | None = self._crew.of(thread)
        if member is None and change and thread not in self._strangers:
            self._strangers.add(thread)
            for each in self._crew:
                file, command = self._root + path, command_line(thread)
                each.trace.record("stranger", pid=thread, command=command, file=file)
        return member

    def _perform(
        self,
        member: Member,
        name: str,
        path: str,
        do: Callable[[Any], Any],
        data: bytes | None = None,
        **facts: object,
    ) -> Any:
        thread = _caller()
        self._looked.pop(thread, None)
        try:
            return member.operations.of(thread).perform(
                f"storage/{name}", do, data, None, {"file": self._root + path, **facts}
            )
        except FileNotFoundError:
            with self._lock:
                self._content.missed(member, self._root + path, path)
            raise

    def _change(
        self,
        name: str,
        path: str,
        do: Callable[[Any], int],
        *,
        fh: int | None = None,
        **facts: object,
    ) -> int:
        member = self._member(name if name in _CHANGES else "", path, fh)
        if member is None:
            return do(None)
        self._perform(member, name, path, do, **facts)
        return 0

    def _opened(
        self, member: Member | None, path: str, do: Callable[[Any], int], *, is_written: bool
    ) -> int:
        opened: list[int] = []
        try:
            if member is None:
                opened.append(do(None))
            else:
                self._perform(member, "create", path, lambda data: opened.append(do(data)))
        except OSError:
            for handle in opened:  # reported as failed, though it took effect
                os.close(handle)
            raise
        rank = None if member is None else member.rank
        self._handles[opened[0]] = _Handle(path, rank, is_written)
        return opened[0]

    def _locked(self, name: str, *arguments: object) -> Callable[[object], int]:
        method = getattr(super(), name)

        def do(_: object) -> int:
            with self._lock:
                return int(method(*arguments))

        return do

    def _is_directory(self, path: str) -> bool:
        with suppress(OSError):
            return stat.S_ISDIR(os.lstat(self._live / path[1:]).st_mode)
        return False

    def _ticked(self, member: Member, path: str, found: dict[str, int]) -> dict[str, int]:
        """With another time while a fault waits for reads, so that the kernel asks again."""
        if stat.S_ISREG(found["st_mode"]) and any(
            each.operations.waits("storage/read", self._root + path) for each in self._crew
        ):
            found["st_mtime"] = found["st_mtime"] // 1000 * 1000 + next(self._ticks) % 1000
        return found


def _misread(handle: _Handle, offset: int, right: bytes, found: bytes) -> bytes:
    """What is read, with the bits that have been read wrongly before by this handle.

    The kernel may fetch more than it was asked for, forget it, and fetch it again; a program that
    reads the file to its end must come upon a bit that flipped on the way.
    """
    if len(right) == len(found) and right != found:
        start, end = difference(right, found)
        for position in range(start, end) if end - start <= _FLIPPED_MOST else ():
            handle.flips[offset + position] = right[position] ^ found[position]
        return found
    flips = {at - offset: bits for at, bits in handle.flips.items()}
    if not any(0 <= at < len(found) for at in flips):
        return found
    changed = bytearray(found)
    for at, bits in flips.items():
        if 0 <= at < len(changed):
            changed[at] ^= bits
    return bytes(changed)


def _caller() -> int:
    """The thread whose operation this is; 0 for the kernel."""
    thread: int = mfusepy.fuse_get_context()[2]
    return thread


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
