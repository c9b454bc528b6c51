"""Starting the switch, and putting processes on its hosts. For the custodian; torch-free."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

from ..errors import LaunchError
from .control import ask

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
        answer = json.loads(line) if line else {"failed": "it said nothing; see launch.log"}
        if "failed" in answer:
            raise LaunchError(f"the hosts' network cannot be made: {answer['failed']}")
        self._namespaces: list[str] = answer["hosts"]

    def on_host(self, host: int) -> list[str]:
        """What a command must begin with to run on ``host``."""
        return ["nsenter", f"--net={self._namespaces[host]}", "--"]

    def look(self) -> None:
        """Have the switch write down what is to be seen of the network now.

        Raises:
            LaunchError, OSError: it is gone, or could not.
        """
        ask(self._directory, do="look")
