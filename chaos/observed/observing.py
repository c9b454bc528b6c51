"""What the file system that observes is told, whose an operation is, and how it is performed.

Guarantees: an operation is performed for the rank whose thread, child or file it is; one of no rank
is carried out, and noted if it changes anything. Its base is the disk itself, which may lose power.

For `seatrial.chaos.observed.filesystem`, which has the operations.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import mfusepy

from ..launch.processes import command_line
from ..powerloss.filesystem import PowerFileSystem
from . import control
from .content import Content
from .crew import Crew, Member
from .elsewhere import Elsewhere
from .handles import Handle, Refusals

_CHANGES = ("create", "write", "rename", "publish", "delete")


class Observing(PowerFileSystem):
    """A file system on ``directory/live``, mounted on ``root``. Several threads."""

    def __init__(self, directory: Path, root: str, *, loses_power: bool) -> None:
        super().__init__(directory, loses_power=loses_power)
        self._root = root
        self._crew = Crew()
        self._content = Content(self._live, directory / "held")
        self._lock = threading.RLock()  # one operation at a time; none is held while one waits
        self._handles: dict[int, Handle] = {}
        self._looked: dict[int, str] = {}  # by thread, what it has just looked up
        self._refusals = Refusals()
        self._strangers: set[int] = set()
        self._ticks = count()
        self._elsewhere = Elsewhere(self._crew, ignored=(str(directory), root))

    # What it is told; see `seatrial.chaos.observed.control`

    def setxattr(self, path: str, name: str, value: bytes, *flags: object) -> int:
        thread, text = caller(), bytes(value).decode()
        if name == control.RANK:
            self._join(thread, path, text)
        elif name == control.PARTING:
            self._elsewhere.drain()
            self._crew.part()
            self._content.part()
        elif name in (control.STEP, control.SAVING, control.CONTENT, control.END):
            member = self._crew.of(thread)
            if member is None:
                return 0  # nothing waits for it here
            if name == control.STEP:
                member.injector.at_step(int(text))
            elif name == control.SAVING:
                member.is_saving = text == "1"
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

    # How they are performed

    def _member(self, change: str = "", path: str = "", fh: int | None = None) -> Member | None:
        """Whose operation it is; what the kernel writes by itself is whose file it is."""
        if not self._crew:
            return None
        thread = caller()
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
        thread = caller()
        self._looked.pop(thread, None)
        fh = facts.get("handle")
        handle = self._handles.get(fh) if isinstance(fh, int) else None
        with self._tried(member, f"storage/{name}", self._root + path, handle):
            try:
                return member.operations.of(thread).perform(
                    f"storage/{name}", do, data, None, {"file": self._root + path, **facts}
                )
            except FileNotFoundError:
                with self._lock:
                    self._content.missed(member, self._root + path, path)
                raise

    @contextmanager
    def _tried(
        self, member: Member, event: str, file: str, handle: Handle | None
    ) -> Iterator[None]:
        """The body is an operation of a rank, perhaps one that was refused before."""
        try:
            yield
        except OSError as error:
            with self._lock:
                member.retries.refused(event, file, handle, error)
            raise
        with self._lock:
            if member.retries.are_over(event, file, handle):
                member.trace.record("overcome", event=event, file=file)

    def _change(
        self,
        name: str,
        path: str,
        do: Callable[[Any], int],
        *,
        fh: int | None = None,
        asked: str | None = None,
    ) -> int:
        member = self._member(name if name in _CHANGES else "", path, fh)
        if member is None:
            return do(None)
        self._perform(member, name, path, do, asked=asked)
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
        self._handles[opened[0]] = Handle(path, rank, is_written)
        self._looked[caller()] = path
        return opened[0]

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


def caller() -> int:
    """The thread whose operation this is; 0 for the kernel."""
    thread: int = mfusepy.fuse_get_context()[2]
    return thread
