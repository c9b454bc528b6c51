"""The simulated disk: starts and ends the file system's process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from ..errors import UsageError
from .control import CONTROL, LOSSES
from .mounts import unmount

_MOUNTING_S = 20.0


class FuseDisk:
    """A `seatrial.chaos.powerloss.disk.PowerDisk` by `seatrial.chaos.powerloss.filesystem`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.root = directory / "mounted"
        self.root.mkdir(parents=True)
        self._log = directory / "log"
        module = "seatrial.chaos.powerloss.filesystem"
        arguments = [str(directory), str(self.root), str(os.getpid())]
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
                raise UsageError(f"--chaos-powerloss fuse: cannot be mounted: {said}")
            time.sleep(0.01)

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
