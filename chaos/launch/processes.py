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


def _parents() -> dict[int, int]:
    """The parent of every live process; zombies are left out, they only wait to be reaped."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name in parentheses may itself hold spaces and parentheses.
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    found[int(entry.name)] = int(parent)
    return found


def descendants(pid: int) -> list[int]:
    """Every live process that descends from ``pid``, nearest first."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents().items():
        children.setdefault(parent, []).append(child)
    found: list[int] = []
    level = children.get(pid, [])
    while level:
        found += level
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
    while alive := descendants(pid):
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
