"""How the disk that observes is spoken to; apart, so that a rank needs no FUSE to know it.

A rank tells it who it is, which faults wait for it and in which step it is, by extended attributes
of its store, so the disk knows before the rank's next operation. Where the store is not on such a
disk nothing is said, and nobody is asked. Torch-free.
"""

from __future__ import annotations

import os
from contextlib import suppress

ROOT = "user.seatrial.root"
"""Reads as the directory that the disk is mounted on."""
RANK = "user.seatrial.rank"
"""Written by a rank: its faults, as JSON. Reads as how files beside the disk are looked for."""
STEP = "user.seatrial.step"
"""Written by a rank: the number of the step that it is in."""
SAVING = "user.seatrial.saving"
"""Written by a rank: 1 when a save begins, 0 when it is done."""
CONTENT = "user.seatrial.content"
"""Written by a rank: what it writes in a save are checkpoints of the job's own."""
END = "user.seatrial.end"
"""Written by a rank that leaves in good order."""
PARTING = "user.seatrial.parting"
"""Written when all processes of an attempt are gone."""


def root_of(store: str) -> str | None:
    """The directory that the disk is mounted on which sees what is done in ``store``; None if no
    disk does."""
    with suppress(OSError):
        return os.fsdecode(os.getxattr(store, ROOT))
    return None


class Link:
    """What a rank tells its disk; a listener of `seatrial.recovery.probe`."""

    def __init__(self, store: str, root: str) -> None:
        self._store = store
        self._roots = tuple(os.path.join(each, "") for each in {root, os.path.realpath(root)})
        self._told: object = None

    def join(self, plan: str) -> bool:
        """Tell who this rank is; whether the rank itself has to look for files beside the disk."""
        os.setxattr(self._store, RANK, plan.encode())
        return os.getxattr(self._store, RANK) == b"audit"

    def __call__(self, event: str, edge: str, facts: dict[str, object]) -> None:
        step = facts.get("step")
        if isinstance(step, int) and step != self._told:
            os.setxattr(self._store, STEP, str(step).encode())
            self._told = step
        if event == "checkpoint":
            os.setxattr(self._store, SAVING, b"1" if edge == "before" else b"0")

    def holds(self, file: str) -> bool:
        """Whether ``file`` is on the disk."""
        return f"{file}/".startswith(self._roots) or os.path.realpath(file).startswith(self._roots)

    def end(self) -> None:
        """Tell that the rank leaves."""
        with suppress(OSError):  # without power nothing can be told
            os.setxattr(self._store, END, b"1")


def store_is_the_jobs(store: str) -> None:
    """Tell the disk, if there is one, that the job writes its checkpoints by itself."""
    if root_of(store) is not None:
        os.setxattr(store, CONTENT, b"1")


def part(root: str) -> None:
    """Tell the disk, if there is one, that all processes of an attempt are gone."""
    if root_of(root) is not None:
        os.setxattr(root, PARTING, b"1")
