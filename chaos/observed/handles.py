"""Open files of the disk, and what the kernel and programs make of operations that failed.

The kernel fetches more than it was asked for, forgets it, fetches it again, and keeps to itself
that something failed which nobody had needed yet. A fault must reach the program all the same.
Torch-free; for `seatrial.chaos.observed.filesystem`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..storage.alteration import INJECTED
from .scars import difference

_FLIPPED_MOST = 8  # bytes; what is longer is another version of the file


@dataclass
class Handle:
    """An open file.

    Attributes:
        path: its name when it was opened.
        rank: who opened it; None for a process of no rank.
        is_written: it has been, since it was last closed.
        is_unread: it was opened to be read, and nothing of it has been fetched.
        flips: bytes that read wrongly, by position, and which bits of them.
    """

    path: str
    rank: int | None
    is_written: bool = False
    is_unread: bool = False
    flips: dict[int, int] = field(default_factory=dict)

    def misread(self, offset: int, right: bytes, found: bytes) -> bytes:
        """What is read: ``found``, with the bits that have been read wrongly here before.

        So a program that reads the file to its end comes upon a bit that flipped on the way.
        """
        if len(right) == len(found) and right != found:
            start, end = difference(right, found)
            for position in range(start, end) if end - start <= _FLIPPED_MOST else ():
                self.flips[offset + position] = right[position] ^ found[position]
            return found
        here = {at - offset: bits for at, bits in self.flips.items()}
        here = {at: bits for at, bits in here.items() if 0 <= at < len(found)}
        if not here:
            return found
        changed = bytearray(found)
        for at, bits in here.items():
            changed[at] ^= bits
        return bytes(changed)


class Retries:
    """Which operations of a rank faults have refused, and which of those it has tried again.

    A program that gives up still writes and closes what it has open. So where a file is open, only
    success by another opening of it shows that the refusal was dealt with.
    """

    def __init__(self) -> None:
        self._refused: dict[tuple[str, str], Handle | None] = {}

    def refused(self, event: str, file: str, handle: Handle | None, error: OSError) -> None:
        """An operation has failed; of others than faults nothing is kept."""
        if INJECTED in str(error):
            self._refused[event, file] = handle

    def are_over(self, event: str, file: str, handle: Handle | None) -> bool:
        """An operation has succeeded; whether a refusal is dealt with by that."""
        before = self._refused.get((event, file), handle)
        if (event, file) not in self._refused or (handle is not None and before is handle):
            return False
        del self._refused[event, file]
        return True


@dataclass(frozen=True)
class _Refusal:
    handle: int
    start: int
    end: int
    error: OSError


class Refusals:
    """Readings that failed, of which the kernel may only have thought that they would be needed.

    It asks again for what is, for a page that is mapped more than once; then the program must be
    told. Every reading by ``read`` begins with a question for the file's size, which `forget`s.
    """

    def __init__(self) -> None:
        self._by_thread: dict[int, _Refusal] = {}
        self._names: dict[int, tuple[str, OSError]] = {}

    def note(self, thread: int, handle: int, start: int, end: int, error: OSError) -> None:
        """The reading of these bytes has failed."""
        self._by_thread[thread] = _Refusal(handle, start, end, error)

    def again(self, thread: int, handle: int, offset: int) -> OSError | None:
        """The error of the reading that the kernel repeats now, if it does."""
        before = self._by_thread.get(thread)
        if before is None or before.handle != handle or not before.start <= offset < before.end:
            return None
        return before.error

    def forget(self, thread: int) -> None:
        """The program itself reads anew."""
        self._by_thread.pop(thread, None)

    def note_name(self, thread: int, path: str, error: OSError) -> None:
        """A question for a name has failed, to which there is an answer."""
        self._names[thread] = (path, error)

    def of_name(self, thread: int, path: str) -> OSError | None:
        """The error of the question that the kernel repeats now, if it does: once, where it had
        known an answer before."""
        name, error = self._names.pop(thread, ("", None))
        return error if name == path else None
