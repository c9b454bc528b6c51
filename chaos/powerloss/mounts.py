"""Unmounting, also of what is still in use or whose file system has died."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

_ESCAPES = {r"\040": " ", r"\011": "\t", r"\012": "\n", r"\134": "\\"}


def unmount(path: Path | str) -> None:
    """Unmount whatever is mounted on ``path``; what is in use goes when it is left."""
    # As the kernel lists it; what is mounted may have died, so it is not asked itself.
    above, name = os.path.split(path)
    path = os.path.join(os.path.realpath(above), name)
    while path in _mount_points():
        for command in (
            ["umount"],
            ["fusermount3", "-u"],
            ["umount", "-l"],
            ["fusermount3", "-uz"],
        ):
            if shutil.which(command[0]) is None:
                continue
            if subprocess.run([*command, path], capture_output=True, check=False).returncode == 0:
                break
        else:
            return


def unmount_below(directory: Path | str) -> None:
    """Unmount everything below a directory that is to be removed."""
    prefix = os.path.join(os.path.realpath(directory), "")
    for path in reversed(_mount_points()):
        if path.startswith(prefix):
            unmount(path)


def _mount_points() -> list[str]:
    """In the order in which they were mounted."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        path = line.split()[4]
        for escape, character in _ESCAPES.items():
            path = path.replace(escape, character)
        found.append(path)
    return found
