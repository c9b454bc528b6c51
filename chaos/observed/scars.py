"""Which bytes at rest a fault has changed, and whether anybody has read them since.

A lie needs a witness. The disk is the best there is: it knows what should have been written, and
sees who reads. Guarantees: a scar is healed by whatever overwrites all of it, cuts it off, or
removes the file; a file keeps its scars under another name.

Does not: judge what the reader made of it. Not safe for threads; for
`seatrial.chaos.observed.filesystem`. Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Scar:
    """Bytes ``start`` to ``end`` of a file are not what was written there, by a fault's doing."""

    fault: int
    step: int | None
    start: int
    end: int


@dataclass
class HeldWrite:
    """Bytes ``start`` to ``end`` of a file that are held back, to be written by ``copy``.

    ``scars`` are of the faults that hold it. What is written there in the meantime is newer.
    """

    copy: int
    inode: int
    start: int
    end: int
    scars: list[Scar] = field(default_factory=list)
    newer: list[tuple[int, int]] = field(default_factory=list)

    def note_newer(self, start: int, end: int) -> None:
        """Those bytes have been written, or cut off, in the meantime."""
        start, end = max(start, self.start), min(end, self.end)
        if start < end:
            self.newer.append((start, end))

    def damage(self) -> Iterator[Scar]:
        """What it does when it lands."""
        for scar in self.scars:
            for start, end in self.newer:
                yield replace(scar, start=start, end=end)


class Scars:
    """The scars of all files of a disk, by inode, and of files that are missing, by path."""

    def __init__(self) -> None:
        self._by_inode: dict[int, list[Scar]] = {}
        self._missing: dict[str, list[Scar]] = {}

    def add(self, inode: int, scar: Scar) -> None:
        self._by_inode.setdefault(inode, []).append(scar)

    def add_missing(self, path: str, scar: Scar) -> None:
        """The file should be there and is not."""
        self._missing.setdefault(path, []).append(scar)

    def heal(self, inode: int, start: int, end: int) -> None:
        """All bytes between have been written anew."""
        if own := self._by_inode.get(inode):
            own[:] = [each for each in own if not (start <= each.start and each.end <= end)]

    def cut(self, inode: int, length: int) -> None:
        """The file was cut to a length, and what was beyond is gone for another reason."""
        if own := self._by_inode.get(inode):
            own[:] = [each for each in own if each.start < length]

    def removed(self, inode: int) -> None:
        """The last name of the file is gone."""
        self._by_inode.pop(inode, None)

    def made(self, path: str) -> None:
        """The file is there now."""
        self._missing.pop(path, None)

    def moved(self, old: str, new: str) -> None:
        """A directory has another name, and what is missing in it is missing there."""
        self.gone(new)
        for path in _below(old, self._missing):
            self._missing[new + path[len(old) :]] = self._missing.pop(path)

    def gone(self, path: str) -> None:
        """A directory was deleted; nothing should be there any more."""
        for each in _below(path, self._missing):
            del self._missing[each]

    def missing_in(self, directory: str) -> list[tuple[str, Scar]]:
        """The files that should be in a directory and are not."""
        return [
            (path, scar)
            for path, scars in self._missing.items()
            if os.path.dirname(path) == directory
            for scar in scars
        ]

    def missed(self, path: str) -> list[Scar]:
        """Whose doing it is that a file is not there."""
        return self._missing.get(path, [])

    def read(self, inode: int, start: int, end: int, size: int) -> Iterator[Scar]:
        """The scars that a reader of these bytes came upon; the file has ``size`` bytes.

        Of one beyond the end of the file: whoever read to that end.
        """
        for scar in self._by_inode.get(inode, ()):
            overlaps = scar.start < end and max(scar.end, scar.start + 1) > start
            if overlaps or (scar.start >= size and end >= size):
                yield scar


def _below(directory: str, paths: Iterable[str]) -> list[str]:
    beginning = os.path.join(directory, "")
    return [path for path in paths if path.startswith(beginning)]


def difference(before: bytes, after: bytes) -> tuple[int, int]:
    """The first byte in which they differ, and the end of the last; equal lengths or not."""
    length = max(len(before), len(after))
    same = _same(before, after)
    if len(before) != len(after):
        return same, length
    return same, length - _same(before[::-1], after[::-1])


def _same(before: bytes, after: bytes) -> int:
    """How many bytes are equal at the beginning."""
    low, high = 0, min(len(before), len(after))
    while low < high:
        middle = (low + high + 1) // 2
        if before[low:middle] == after[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
