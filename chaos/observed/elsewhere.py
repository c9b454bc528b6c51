"""Which files ranks wrote beside the disk, where no fault can reach them.

With root, by fanotify: the kernel tells of every file that was open for writing and is closed,
whoever wrote it and however. Without, a rank looks at what its own Python opens
(`seatrial.chaos.observed.audit`), and native code is not seen; the trace says which it was.

Does not: look at memory (``/dev/shm``), at the directory of the run itself with its temporary
files, or at what is not a regular file on a file system with a device. Torch-free.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from .crew import Crew

# linux/fanotify.h
_CLOEXEC, _NONBLOCK, _UNLIMITED_QUEUE = 0x1, 0x2, 0x10
_ADD, _FILESYSTEM = 0x1, 0x100
_CLOSE_WRITE = 0x8
_EVENT = struct.Struct("=IBBHQii")

_NO_FILES = (
    *(
        "proc",
        "sysfs",
        "devtmpfs",
        "devpts",
        "mqueue",
        "cgroup",
        "cgroup2",
        "securityfs",
        "debugfs",
    ),
    *("tracefs", "bpf", "pstore", "binfmt_misc", "hugetlbfs", "configfs", "fusectl", "nsfs"),
)
_MOST = 20
"""Files of one rank."""


class Elsewhere:
    """Watches while anybody is in ``crew``. Attributes: ``is_watching`` is whether it may."""

    def __init__(self, crew: Crew, *, ignored: tuple[str, ...]) -> None:
        self._crew = crew
        self._ignored = tuple(os.path.join(each, "") for each in (*ignored, "/dev"))
        self._lock = threading.Lock()
        self._said: set[tuple[str, int, str]] = set()
        self._queue = _watch_all()
        self.is_watching = self._queue is not None
        if self._queue is not None:
            threading.Thread(target=self._run, args=(self._queue,), daemon=True).start()

    def drain(self) -> None:
        """Take note of everything that has happened so far."""
        with self._lock, suppress(BlockingIOError):
            while self._queue is not None:
                for process, file in _events(os.read(self._queue, 1 << 16)):
                    self._note(process, file)

    def _run(self, queue: int) -> None:
        while True:
            select.select([queue], [], [])
            self.drain()

    def _note(self, process: int, file: str) -> None:
        if not self._crew or file.startswith(self._ignored) or file.endswith(" (deleted)"):
            return
        member = self._crew.of_process(process)
        if member is None or file.startswith(os.path.join(member.run_directory, "")):
            return
        said = (member.run_directory, member.rank, file)
        mine = sum(each[:2] == said[:2] for each in self._said)
        if said not in self._said and mine < _MOST:
            self._said.add(said)
            member.trace.record("elsewhere", file=file)


def _watch_all() -> int | None:
    """A queue of events of all file systems with files; None without the right to watch."""
    libc = ctypes.CDLL(None, use_errno=True)
    queue: int = libc.fanotify_init(
        _CLOEXEC | _NONBLOCK | _UNLIMITED_QUEUE, os.O_RDONLY | os.O_CLOEXEC
    )
    if queue < 0:
        return None
    libc.fanotify_mark.argtypes = [
        *(ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p)
    ]
    watched = 0
    for place in _places():
        done = libc.fanotify_mark(queue, _ADD | _FILESYSTEM, _CLOSE_WRITE, -100, os.fsencode(place))
        watched += done == 0
    if not watched:
        os.close(queue)
        return None
    return queue


def _places() -> Iterator[str]:
    """One mount point of each file system that has files."""
    seen = set()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        device, point = line.split()[2], line.split()[4]
        kind = line.partition(" - ")[2].split()[0]
        is_ours = kind.startswith("fuse") or point == "/dev/shm"
        if kind not in _NO_FILES and not is_ours and device not in seen:
            seen.add(device)
            yield point.encode().decode("unicode_escape")


def _events(data: bytes) -> Iterator[tuple[int, str]]:
    """``(process, file)`` of each event."""
    at = 0
    while at < len(data):
        length, _, _, _, _, file, process = _EVENT.unpack_from(data, at)
        at += length
        if file >= 0:
            try:
                yield process, os.readlink(f"/proc/self/fd/{file}")
            finally:
                os.close(file)
