"""Starting the switch. For the custodian; torch-free."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from .control import SOCKET, ask

_START_S = 60.0


class SwitchProcess:
    """The switch of one attempt, a child of this process; see `seatrial.chaos.network.switch`.

    Args:
        directory: the attempt's; its socket is there.
        trace: where the switch writes what it saw.
        hosts: how many there are.

    Raises:
        LaunchError: the network cannot be made.
    """

    def __init__(self, directory: Path, trace: Path, hosts: int) -> None:
        self._directory = directory
        arguments = [str(directory), str(trace), str(hosts), str(os.getpid())]
        with (directory / "launch.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "seatrial.chaos.network.switch", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        process.returncode = 0  # the custodian reaps by pid itself
        self.pid = process.pid
        assert process.stdout is not None
        with process.stdout as said:
            ready = select.select([said], [], [], _START_S)[0]
            line = said.readline() if ready else b""
        answer: dict[str, Any] = (
            json.loads(line) if line else {"failed": "it said nothing; see launch.log"}
        )
        if "failed" in answer:
            raise LaunchError(f"the hosts' network cannot be made: {answer['failed']}")
        self.namespaces: list[str] = answer["hosts"]
        """Paths of the hosts' namespaces; see `seatrial.chaos.network.namespaces.enter`."""

    def forget(self) -> None:
        """Remove what a switch that has been killed leaves in the directory."""
        (self._directory / SOCKET).unlink(missing_ok=True)

    def look(self) -> None:
        """Have the switch write down what is to be seen of the network now.

        Raises:
            LaunchError, OSError: it is gone, or could not.
        """
        ask(self._directory, do="look")
