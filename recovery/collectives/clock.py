"""What one thread did with its time: on a processor, waiting for one, or neither.

Guarantees: readings of a thread's own, in seconds since some point in the past; wall time is
``CLOCK_MONOTONIC``. A thread that is ready to run and has no processor, because others have them,
is told apart from one that sleeps, waits or is stopped by the kernel's own count of it
(``/proc/thread-self/schedstat``, field 2: Linux's Documentation/scheduler/sched-stats.rst). Where
the kernel keeps none, `ThreadClock.knows_starved` is False and that time counts as neither. A
reading costs some microseconds.

Does not see: a hypervisor that gives a virtual machine's processor to another; that looks like time
on the processor.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import NamedTuple

_NS = 1e-9


class Reading(NamedTuple):
    """Seconds: on the wall, on a processor, and ready to run without one."""

    wall: float
    cpu: float
    starved: float


class ThreadClock:
    """The clock of the thread that makes it, to be read in that thread alone."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._file = -1
        self._others: dict[str, _Other] = {}
        self._gone = 0.0
        try:
            # Resolved at once: the file stays that of this thread.
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            self.knows_starved = os.pread(self._file, 64, 0).split()[:2] != [b"0", b"0"]
        except OSError:
            self.knows_starved = False

    def read(self) -> Reading:
        return Reading(time.monotonic(), time.thread_time(), self.starved())

    def starved(self) -> float:
        """Seconds for which the thread was ready to run and had no processor."""
        if not self.knows_starved:
            return 0.0
        return int(os.pread(self._file, 64, 0).split()[1]) * _NS

    def others_starved(self) -> float:
        """Seconds for which the other threads of the process were ready to run and had no
        processor, all together. Costs some microseconds for each thread."""
        if not self.knows_starved:
            return 0.0
        own = str(threading.get_native_id())
        alive = set(os.listdir("/proc/self/task")) - {own}
        for name in self._others.keys() - alive:
            self._gone += self._others.pop(name).close()
        for name in alive - self._others.keys():
            with contextlib.suppress(OSError):  # gone meanwhile
                self._others[name] = _Other(name)
        return self._gone + sum(other.starved() for other in self._others.values())

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file, self.knows_starved = -1, False
        for other in self._others.values():
            other.close()
        self._others.clear()


class _Other:
    """Another thread of the process, and what was last known of it."""

    def __init__(self, name: str) -> None:
        self._file = os.open(f"/proc/self/task/{name}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._starved = 0.0

    def starved(self) -> float:
        with contextlib.suppress(OSError):  # gone meanwhile
            self._starved = int(os.pread(self._file, 64, 0).split()[1]) * _NS
        return self._starved

    def close(self) -> float:
        os.close(self._file)
        return self._starved
