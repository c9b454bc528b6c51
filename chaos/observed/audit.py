"""A rank looks for files that its own Python opens for writing beside the disk.

For where the kernel may not be asked (`seatrial.chaos.observed.elsewhere`). Native code is not
seen; the trace says that it was not. Torch-free.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from ..trace import TraceWriter

_MOST = 20


def look_for_files(
    trace: TraceWriter, *, ignored: tuple[str, ...], holds: Callable[[str], bool]
) -> None:
    """From now on record what this process opens for writing, but on the disk, which ``holds``
    them, and below the directories ``ignored``. Cannot be undone."""
    seen: set[str] = set()
    below = tuple(os.path.join(each, "") for each in (*ignored, "/dev", "/proc"))
    own = os.getpid()
    is_busy = False

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal is_busy
        if event != "open" or is_busy or len(seen) >= _MOST or os.getpid() != own:
            return
        path, _, flags = arguments
        if not isinstance(path, (str, bytes)) or not isinstance(flags, int):
            return
        if flags & os.O_ACCMODE == os.O_RDONLY:
            return
        is_busy = True
        try:
            file = os.path.abspath(os.fsdecode(path))
            if file not in seen and not file.startswith(below) and not holds(file):
                seen.add(file)
                trace.record("elsewhere", file=file, via="audit")
        finally:
            is_busy = False

    sys.addaudithook(hook)
