"""Linux process custody: who descends from whom, and making sure that nobody is left.

The functions here touch only descendants of a given process, never a process by name or by a
remembered id. They read ``/proc`` and call ``prctl(2)``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to SIGKILL this process when its parent, process ``parent``, dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # The parent died between the fork and the request.
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class _Process:
    parent: int
    is_alive: bool


def _processes() -> dict[int, _Process]:
    """Every process. One that has exited is dead; a leader whose threads go on is not."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name in parentheses may itself hold spaces and parentheses.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                is_alive = fields[0] != "Z" or int(fields[17]) > 1  # the number of threads
                found[int(entry.name)] = _Process(int(fields[1]), is_alive)
    return found


def descendants(pid: int) -> list[int]:
    """Every live process that descends from ``pid``, nearest first.

    Dead ones that wait to be reaped are looked through: their children are theirs until the last
    of their threads is gone.
    """
    processes = _processes()
    children: dict[int, list[int]] = {}
    for child, process in processes.items():
        children.setdefault(process.parent, []).append(child)
    found: list[int] = []
    level = children.get(pid, [])
    while level:
        found += [each for each in level if processes[each].is_alive]
        level = [grandchild for child in level for grandchild in children.get(child, [])]
    return found


def kill_descendants(pid: int, *, limit_s: float = 10.0) -> list[int]:
    """SIGKILL every descendant of ``pid`` until none is left; returns those that were there.

    Orphans must be adopted by ``pid`` (`adopt_orphans`) and, if ``pid`` is this process, are
    reaped here.

    Raises:
        TimeoutError: a process survives SIGKILL, for example in uninterruptible sleep.
    """
    killed: dict[int, None] = {}
    deadline = time.monotonic() + limit_s
    quiet = 0
    # Twice, because a process whose parent goes while we look seems to belong to nobody.
    while quiet < 2:
        alive = descendants(pid)
        quiet = 0 if alive else quiet + 1
        for each in alive:
            killed[each] = None
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {alive} survive SIGKILL")
        time.sleep(0.001)
    return list(killed)


def command_line(pid: int) -> str:
    """The command line of a process for a message; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""
