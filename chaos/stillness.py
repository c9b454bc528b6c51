"""Whether the processes of an attempt do anything at all, as the kernel tells.

Guarantees: processes are still only while none of their threads runs, is ready to run, or waits for
a disk (states R and D), and while together they use next to no processor time. So a rank that is
slow because others have the processors, or because a disk is busy, is never still. Torch-free.

Does not know why: a thread that sleeps for a while, or waits for the network, is as still as one
that waits for ever. Sees this machine alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_AT_WORK = ("R", "D")
_EXITING = 0x4
"""Of a process's flags: ``PF_EXITING`` in Linux's include/linux/sched.h."""
_CPU_SHARE_MAX = 0.05
"""Of one processor, for all threads: some wake up a hundred times a second to look at a file."""
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class _Look:
    threads: frozenset[int]
    at_work: bool
    cpu_s: float


class Stillness:
    """Is to be asked again and again."""

    def __init__(self) -> None:
        self._since: tuple[float, _Look] | None = None

    def lasts_s(self, processes: Sequence[int], now: float) -> float:
        """For how long, up to ``now``, ``processes`` have been still whenever this was asked.

        0 if they are not, if others have come or gone, or if there are none.
        """
        look = _look_at(processes)
        if look.at_work or not look.threads:
            self._since = None
            return 0.0
        if self._since is not None:
            then, before = self._since
            used = look.cpu_s - before.cpu_s
            # The kernel counts in ticks, and may have counted the first of them too late.
            may_use = _CPU_SHARE_MAX * (now - then) + _TICK_S
            if look.threads == before.threads and used <= may_use:
                return now - then
        self._since = now, look
        return 0.0


def is_awake(process: int) -> bool:
    """Whether a process is there, and neither dead nor stopped by a signal."""
    state = _fields(Path(f"/proc/{process}"))[:1]
    return bool(state) and state[0] not in ("T", "Z", "X")


def is_stopped(process: int) -> bool:
    """Whether a process was stopped by a signal, and does not run until it is continued."""
    return _fields(Path(f"/proc/{process}"))[:1] == ["T"]


def is_exiting(process: int) -> bool:
    """Whether a process has begun to leave, or has left and nobody has taken note of it yet.

    The kernel says so before it closes the process's files, hence before any peer can notice.
    """
    fields = _fields(Path(f"/proc/{process}"))
    return bool(fields) and (fields[0] in ("Z", "X") or bool(int(fields[6]) & _EXITING))


def _look_at(processes: Sequence[int]) -> _Look:
    threads: set[int] = set()
    at_work, cpu_s = False, 0.0
    for process in processes:
        for entry in _threads(process):
            fields = _fields(entry)
            if not fields:
                continue
            threads.add(int(entry.name))
            at_work = at_work or fields[0] in _AT_WORK
            cpu_s += (int(fields[11]) + int(fields[12])) * _TICK_S
    return _Look(frozenset(threads), at_work, cpu_s)


def _threads(process: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{process}/task").iterdir())
    except OSError:
        return []


def _fields(entry: Path) -> list[str]:
    """Of the ``stat`` of a process or thread, from its state on; none if it is gone."""
    try:
        # The name in parentheses may itself hold spaces and parentheses.
        return (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
