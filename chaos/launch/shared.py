"""A directory that several processes use, and that whoever is left last may remove.

Guarantees: a directory that somebody uses is never taken for one that nobody does, however its
users end: the kernel drops a lock with the last process that holds it.

Does not: keep a user from coming while the directory is being removed. Torch-free.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

_LOCK = ".in-use"


class Use:
    """This process uses ``directory``, which is made if need be; what it forks does not."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(directory / _LOCK, flags, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_SH)
        os.register_at_fork(after_in_child=self.end)

    def end(self) -> None:
        """Safe to call twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def nobody_uses(directory: Path) -> bool:
    """Whether no process uses ``directory``, or has since it was made."""
    try:
        file = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True
