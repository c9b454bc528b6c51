"""Disks that lose power: what was not made durable may be gone when they come back.

`open_disk` gives one: ``fuse`` simulates what POSIX promises, exactly and for whatever program
writes there; ``ext4`` and ``xfs`` are the real file systems on an image that is copied at the cut.
"""

from .disk import KINDS, OBSERVING, PowerDisk, check_kind, open_disk

__all__ = ["KINDS", "OBSERVING", "PowerDisk", "check_kind", "open_disk"]
