"""Running out of memory for real, without taking the machine along.

The address space of this process is limited to a little more than it already uses, and then used
up. The job sees what it would see on a full machine: ``MemoryError``, or a `RuntimeError` from
torch's allocator. Device memory is not touched. The limit stays, so a job that swallows the error
meets it again.
"""

from __future__ import annotations

import resource
from pathlib import Path

_HEADROOM_BYTES = 8 << 20
_BLOCK_BYTES = 1 << 20


def exhaust_memory() -> None:
    """Lower ``RLIMIT_AS`` and allocate until the allocator refuses.

    Raises:
        MemoryError: always; the memory taken is given back, the limit is not lifted.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used_bytes = pages * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + _HEADROOM_BYTES, hard))
    taken = []
    try:
        while True:
            taken.append(bytearray(_BLOCK_BYTES))
    finally:
        # The traceback keeps this frame alive, and printing it needs some memory.
        taken.clear()
