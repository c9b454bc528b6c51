"""The disk in user space, with power to lose or without: starts and ends its process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from ..errors import UsageError
from ..observed.control import part
from .control import CONTROL, LOSSES
from .mounts import unmount

_MOUNTING_S = 20.0


class FuseDisk:
    """A `seatrial.chaos.powerloss.disk.PowerDisk` by `seatrial.chaos.observed.filesystem`."""

    def __init__(self, directory: Path, *, loses_power: bool = True) -> None:
        self._directory = directory
        self.root = directory / "mounted"
        self.root.mkdir(parents=True)
        self._log = directory / "log"
        module = "seatrial.chaos.observed.filesystem"
        arguments = [str(directory), str(self.root), str(os.getpid())]
        arguments += ["power"] * loses_power
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for pytest
            )
        deadline = time.monotonic() + _MOUNTING_S
        while not os.path.ismount(self.root):
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = self._log.read_text().strip().rpartition("\n")[2]
                self.close()
                raise UsageError(f"the disk 'fuse' cannot be mounted: {said}")
            time.sleep(0.01)

    def part(self) -> None:
        part(str(self.root))

    def restore_power(self) -> list[str] | None:
        if os.getxattr(self.root, CONTROL) != b"off":
            return None
        os.setxattr(self.root, CONTROL, b"on")
        losses = self._directory / LOSSES
        lost: list[str] = json.loads(losses.read_text())
        losses.unlink()
        return lost

    def close(self) -> None:
        unmount(self.root)
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)
