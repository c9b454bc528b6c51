"""The kinds of disk that can lose power, and what each needs of this machine.

Torch-free; used by the session in pytest's process.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Protocol

from ..errors import UsageError

KINDS = {
    "fuse": "what POSIX promises, simulated: the schedule says what survives",
    "ext4": "ext4 on an image, which is copied at the cut and mounted again",
    "xfs": "XFS, likewise",
}
"""Every kind of disk that can lose power."""

OBSERVING = ("fuse",)
"""Those that see every operation of every program on them."""


class PowerDisk(Protocol):
    """A mounted disk. Attributes: ``root`` is the directory that it is mounted on."""

    root: Path

    def restore_power(self) -> list[str] | None:
        """Bring the disk back after a cut; no process may use it.

        Returns:
            What was lost, in words, by path; None if the power was never cut.
        """

    def part(self) -> None:
        """All processes of an attempt are gone."""

    def close(self) -> None:
        """Unmount, and remove everything. Twice is fine."""


def check_kind(kind: str, option: str = "--chaos-powerloss") -> None:
    """Whether this machine can have such a disk, for which ``option`` asked.

    Raises:
        UsageError: it cannot, with what is missing.
    """
    kinds = KINDS if option == "--chaos-powerloss" else OBSERVING
    if kind not in kinds:
        raise UsageError(f"{option} {kind!r}: choose one of {', '.join(kinds)}")
    for missing, what in _lacks_fuse() if kind == "fuse" else _lacks_images(kind):
        if missing:
            raise UsageError(f"{option} {kind} needs {what}")


def open_disk(kind: str, directory: Path, *, loses_power: bool = True) -> PowerDisk:
    """Mount an empty disk below ``directory``, which must not exist yet.

    Raises:
        UsageError: as `check_kind`, or it cannot be mounted.
    """
    from .fuse import FuseDisk
    from .image import ImageDisk

    check_kind(kind)
    if kind == "fuse":
        return FuseDisk(directory, loses_power=loses_power)
    return ImageDisk(kind, directory)


def _lacks_fuse() -> list[tuple[bool, str]]:
    from ctypes.util import find_library

    return [
        (importlib.util.find_spec("mfusepy") is None, "mfusepy: pip install 'seatrial[powerloss]'"),
        (not (find_library("fuse3") or find_library("fuse")), "libfuse (fuse3 on Debian)"),
        (not os.path.exists("/dev/fuse"), "/dev/fuse, which this machine does not offer"),
        (not os.access("/dev/fuse", os.R_OK | os.W_OK), "the right to use /dev/fuse"),
        (os.geteuid() != 0 and shutil.which("fusermount3") is None, "root, or fusermount3"),
    ]


def _lacks_images(kind: str) -> list[tuple[bool, str]]:
    package = {"ext4": "e2fsprogs", "xfs": "xfsprogs"}[kind]
    return [
        (os.geteuid() != 0, "root, to mount an image"),
        (
            not os.path.exists("/dev/loop-control"),
            "loop devices, which this machine does not offer",
        ),
        (_program(f"mkfs.{kind}") is None, f"mkfs.{kind} ({package} on Debian)"),
    ]


def _program(name: str) -> str | None:
    places = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
    return shutil.which(name, path=places)
