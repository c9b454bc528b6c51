"""Whose thread it is: from the number that the kernel gives with an operation to a rank.

Guarantees: a thread, a child, or a grandchild of a rank is that rank's, also where its parent has
left, as long as it stays in the rank's session. A number that was given out again is noticed.

Does not: know of a process that has left both its family and its session; it belongs to nobody.
Reads ``/proc``; for `seatrial.chaos.observed.crew`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_EXITING = 0x4  # PF_EXITING of linux/sched.h
_SIGKILL, _SIGSTOP = 1 << 8, 1 << 18


class Callers:
    """Which rank the threads belong to of those processes that have joined."""

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}
        self._known: dict[int, tuple[str, int | None]] = {}

    def join(self, thread: int, rank: int) -> int:
        """The process of ``thread`` is ``rank``; returns its number."""
        process = process_of(thread)
        self._ranks[process] = rank
        self._known.clear()
        return process

    def forget(self) -> None:
        """Nobody has joined."""
        self._ranks.clear()
        self._known.clear()

    def joined(self, process: int) -> int | None:
        """The rank of a process that has joined, whether it still lives or not."""
        return self._ranks.get(process)

    def rank_of(self, thread: int) -> int | None:
        """The rank of a thread that lives; of one that is about to end, None."""
        try:
            fields = _fields(thread)
        except OSError:
            return None
        if int(fields[6]) & _EXITING:
            return None  # what is done to its files now is the kernel's doing
        began = fields[19]
        known = self._known.get(thread)
        if known is None or known[0] != began:
            known = self._known[thread] = (began, self._found(thread))
        return known[1]

    def _found(self, thread: int) -> int | None:
        with suppress(OSError):
            process = process_of(thread)
            while process > 1:
                fields = _fields(process)
                for each in (process, int(fields[3])):  # itself, the leader of its session
                    if each in self._ranks:
                        return self._ranks[each]
                process = int(fields[1])
        return None


def process_of(thread: int) -> int:
    """The process that a thread belongs to."""
    return int(_status(thread)["Tgid"])


def is_dying(thread: int) -> bool:
    """Whether a thread has been killed, and only waits for its operation to end."""
    try:
        return bool(_pending(thread) & _SIGKILL)
    except OSError:
        return True


def is_stopped(process: int) -> bool:
    """Whether SIGSTOP has reached a process, one thread of which waits for its operation."""
    with suppress(OSError):
        if _pending(process) & _SIGSTOP:
            return True
        threads = os.listdir(f"/proc/{process}/task")
        return any(_fields(int(each))[0] == "T" for each in threads)
    return False


def _pending(thread: int) -> int:
    status = _status(thread)
    return int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)


def _status(thread: int) -> dict[str, str]:
    lines = Path(f"/proc/{thread}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _fields(thread: int) -> list[str]:
    """Of ``/proc/THREAD/stat``, from the state on."""
    # The name in parentheses may itself hold spaces and parentheses.
    return Path(f"/proc/{thread}/stat").read_text().rpartition(")")[2].split()
