"""What a job leaves lying about on the machine: temporary files and shared-memory segments.

Each attempt has a ``TMPDIR`` of its own, and torch names its shared-memory files after the process
that made them, so what is found here belongs to the attempt and to nobody else on the machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")


def files_left(directory: Path) -> tuple[str, ...]:
    """Every file and directory directly below ``directory``."""
    return tuple(sorted(str(path) for path in directory.glob("*")))


def shared_memory_left(pids: Iterable[int], *, remove: bool) -> tuple[str, ...]:
    """Segments in ``/dev/shm`` whose name holds one of ``pids``; optionally removes them."""
    wanted = set(pids)
    found = []
    for path in _SHARED_MEMORY.glob("torch_*"):
        if wanted & {int(number) for number in re.findall(r"\d+", path.name)[:1]}:
            found.append(str(path))
            if remove:
                path.unlink(missing_ok=True)
    return tuple(sorted(found))
