"""A real file system that loses power: an image behind a loop device, copied at the cut.

The image holds what the file system had sent to the device; the rest was in the memory of a machine
that is off. The copy is mounted in its place, so the file system recovers by its own journal.
Needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from ..errors import UsageError
from .mounts import unmount
from .volatile import differences, listing

_SIZE_BYTES = {"ext4": 256 << 20, "xfs": 512 << 20}
"""Sparse. 300 MB are the least that mkfs.xfs takes."""
_MAKE = {"ext4": ("mkfs.ext4", "-q", "-F"), "xfs": ("mkfs.xfs", "-q", "-f")}
_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))


class ImageDisk:
    """A `seatrial.chaos.powerloss.disk.PowerDisk` with a file system of the kernel."""

    def __init__(self, kind: str, directory: Path) -> None:
        self._kind, self._directory = kind, directory
        self._image = directory / "image"
        self.root = directory / "mounted"
        self.root.mkdir(parents=True)
        with self._image.open("wb") as image:
            image.truncate(_SIZE_BYTES[kind])
        try:
            _run(*_MAKE[kind], str(self._image))
            self._mount()
        except UsageError:
            self.close()
            raise

    def restore_power(self) -> list[str]:
        before = listing(self.root)
        after = self._image.with_suffix(".cut")
        # Before it is unmounted, which would write everything out.
        _run("cp", "--sparse=always", str(self._image), str(after))
        unmount(self.root)
        after.replace(self._image)
        self._mount()
        return differences(before, listing(self.root))

    def part(self) -> None:
        """It knows of nobody."""

    def close(self) -> None:
        unmount(self.root)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _mount(self) -> None:
        _run("mount", "-t", self._kind, "-o", "loop", str(self._image), str(self.root))
        shutil.rmtree(self.root / "lost+found", ignore_errors=True)


def _run(*command: str) -> None:
    found = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PATH": _PATH}, check=False
    )
    if found.returncode:
        said = (found.stderr or found.stdout).strip().partition("\n")[0]
        raise UsageError(f"--chaos-powerloss: {command[0]} failed: {said}")
