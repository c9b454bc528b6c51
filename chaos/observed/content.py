"""What the files on the disk should hold, and what faults have made of it.

Guarantees: of every write, link and closing that a fault altered, lost or held back, the disk
knows which bytes are not what the program wrote (`seatrial.chaos.observed.scars`), and the trace of
a rank that reads them, or looks for a file that is gone, says so: ``met``. A file that was written
in a save is part of the checkpoint of that step, also for later attempts; any other is of none.

Not safe for threads but for `Content.commit`; for `seatrial.chaos.observed.filesystem`. Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

from ..actions import LIES
from ..storage.alteration import Alteration, step_of_own_content
from .crew import Crew, DiskOperations, Member
from .scars import HeldWrite, Scar, Scars, difference


class Content:
    """Of the files below ``live``; those that are held back wait in ``aside``."""

    def __init__(self, live: Path, aside: Path) -> None:
        self._live = live
        self._aside = aside
        self._scars = Scars()
        self._steps: dict[int, int] = {}  # by inode, of which checkpoint it is
        self._numbers = count()
        self._held: list[HeldWrite] = []

    # What happens to files

    def wrote(self, handle: int, start: int, end: int) -> None:
        """Bytes of an open file have been written."""
        inode = os.fstat(handle).st_ino
        self._scars.heal(inode, start, end)
        for held in self._held:
            if held.inode == inode and held.copy != handle:
                held.note_newer(start, end)

    def written_in(self, handle: int, member: Member) -> None:
        """A rank writes to the file: of a checkpoint, if it does so in a save."""
        inode = os.fstat(handle).st_ino
        if member.saved_step is None:
            self._steps.pop(inode, None)
        else:
            self._steps[inode] = member.saved_step

    def cut(self, file: int | Path, length: int) -> None:
        """A file was given a length."""
        inode = os.stat(file).st_ino
        self._scars.cut(inode, length)
        for held in self._held:
            if held.inode == inode:
                held.note_newer(length, held.end)

    def made(self, path: str) -> None:
        """A name is there."""
        self._scars.made(path)

    def moved(self, old: str, new: str) -> None:
        """A file or a directory has another name."""
        self._scars.moved(old, new)

    def gone(self, path: str) -> None:
        """A name was deleted."""
        self._scars.gone(path)

    def removed(self, inode: int) -> None:
        """The last name of a file is gone; -1 for none."""
        self._scars.removed(inode)
        self._steps.pop(inode, None)

    def replaced(self, path: str, crew: Crew, root: str) -> None:
        """What has the name is about to be overwritten; a fault may want to serve it as stale."""
        for member in crew:
            if member.operations.keeps_versions(root + path):
                with suppress(OSError):
                    member.operations.remember(root + path, (self._live / path[1:]).read_bytes())

    def held(
        self, handle: int, write: Callable[[int], None], start: int, end: int
    ) -> Callable[[], object]:
        """``write``, to the same file, whatever its name is then and whether it is still open.

        What was written there in between is damaged when it lands.
        """
        held = HeldWrite(os.dup(handle), os.fstat(handle).st_ino, start, end)
        self._held.append(held)

        def do() -> None:
            self._held.remove(held)
            try:
                write(held.copy)
            finally:
                os.close(held.copy)
            for scar in held.damage():
                self._scars.add(held.inode, scar)

        return do

    def part(self) -> None:
        """What was held back is lost."""
        for held in self._held:
            os.close(held.copy)
        self._held.clear()

    # What faults made of them

    def step_of(self, event: str, file: str, member: Member) -> int | None:
        """The step of the checkpoint that a file belongs to; see `Operations.step_of_content`."""
        if not member.is_content:
            return step_of_own_content(event, file)
        if event == "storage/read":
            with suppress(OSError):
                path = self._live / os.path.relpath(file, member.root)
                return self._steps.get(path.stat().st_ino)
        return member.saved_step

    def told(self, operation: Alteration, member: Member) -> None:
        """A fault met an operation, which has been carried out as it is now."""
        asked, handle = operation.facts.get("asked"), operation.facts.get("handle")
        lies = [index for index, fault in operation.reported if fault.action in LIES]
        for index in lies:
            if operation.event == "storage/read":
                member.meet(
                    index, operation.file, self.step_of(operation.event, operation.file, member)
                )
            elif isinstance(asked, bytes) and isinstance(handle, int):
                start, end = 0, len(asked)
                if not (operation.is_lost or operation.hold):
                    start, end = difference(asked, bytes(operation.content))
                offset = operation.facts["offset"]
                assert isinstance(offset, int)
                scar = self._scar(index, member, offset + start, offset + end)
                inode = os.fstat(handle).st_ino
                self._scars.add(inode, scar)
                for held in self._held if operation.hold else ():
                    if (held.inode, held.start, held.end) == (inode, scar.start, scar.end):
                        held.scars.append(scar)
            elif isinstance(asked, str):  # a name that should be there
                self._scars.add_missing(asked, self._scar(index, member, 0, 0))

    def commit(
        self,
        member: Member,
        operations: DiskOperations,
        root: str,
        path: str,
        lock: AbstractContextManager[object],
    ) -> None:
        """A file that was written is closed: the last moment at which its content can change."""
        operation = operations.begin("storage/commit", None, {"file": root + path})
        if operation is None:
            return
        operations.wait(operation.wait_s)
        operation.answer(None)
        where = self._live / path[1:]
        lies = [index for index, fault in operation.reported if fault.action in LIES]
        with lock:
            if operation.is_lost or operation.hold:
                aside = self._aside.with_name(f"{self._aside.name}-{next(self._numbers)}")
                with suppress(FileNotFoundError):
                    where.rename(aside)
                    for index in lies:
                        self._scars.add_missing(path, self._scar(index, member, 0, 0))
                if operation.hold:
                    scars = [self._scar(index, member, 0, 0) for index in lies]
                    operations.hold(operation, lambda: self._put_back(aside, path, lock, scars))
            for change in operation.changes_at_rest(possible=where.is_file()):
                before = where.read_bytes()
                after = change(before)
                where.write_bytes(after)
                start, end = difference(before, after)
                for index, fault in operation.reported:
                    if fault.action in LIES and before != after:
                        scar = self._scar(index, member, start, end)
                        self._scars.add(where.stat().st_ino, scar)
        operation.end()

    def _put_back(
        self, aside: Path, path: str, lock: AbstractContextManager[object], scars: list[Scar]
    ) -> None:
        """A file that was held back is there again, in place of a newer one if there is one."""
        with lock:
            where, found = self._live / path[1:], aside.stat()
            for scar in scars if where.exists() else ():
                self._scars.add(found.st_ino, replace(scar, end=found.st_size))
            aside.rename(where)
            self._scars.made(path)

    def _scar(self, index: int, member: Member, start: int, end: int) -> Scar:
        return Scar(index, member.saved_step, start, end)

    # Who came upon it

    def met(self, member: Member, file: str, handle: int, start: int, end: int) -> None:
        """A rank has read bytes of an open file."""
        found = os.fstat(handle)
        for scar in self._scars.read(found.st_ino, start, end, found.st_size):
            member.meet(scar.fault, file, scar.step)

    def listed(self, member: Member, root: str, directory: str) -> None:
        """A rank was told which files are in a directory."""
        for path, scar in self._scars.missing_in(directory):
            member.meet(scar.fault, root + path, scar.step)

    def missed(self, member: Member, file: str, path: str) -> None:
        """A rank was told that a file is not there."""
        for scar in self._scars.missed(path):
            member.meet(scar.fault, file, scar.step)
