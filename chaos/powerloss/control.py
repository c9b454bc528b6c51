"""How the simulated disk is spoken to; apart, so that a rank needs no FUSE to know it."""

from __future__ import annotations

import os
from contextlib import suppress

CONTROL = "user.seatrial.power"
"""An extended attribute of any path: write ``off SURVIVES`` or ``on``; read ``on`` or ``off``."""

LOSSES = "losses.json"
"""Where the file system leaves what the last cut took: a list of sentences, as JSON."""


def cut_from_rank(path: str, survives: str) -> None:
    """Take the power of the simulated disk that ``path`` is on; a real one needs nothing done.

    From now on every operation on it fails, until the power is restored.
    """
    with suppress(OSError):
        if os.getxattr(path, CONTROL) == b"on":
            os.setxattr(path, CONTROL, f"off {survives}".encode())
