"""Hosts and their switch, and programs of a test that stand on them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from seatrial.chaos.errors import UsageError
from seatrial.chaos.network.available import require_hosts
from seatrial.chaos.network.control import ask
from seatrial.chaos.network.layout import address
from seatrial.chaos.network.process import SwitchProcess
from seatrial.chaos.trace import Record, read_trace

HOSTS = 3
_CLONE_NEWNET = 0x40000000


@pytest.fixture(scope="session")
def available() -> None:
    """Skips where this machine cannot be several hosts."""
    try:
        require_hosts(HOSTS)
    except UsageError as error:
        pytest.skip(str(error))


class Network:
    """A switch with `HOSTS` hosts, and sockets of this process that belong to a host."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._trace = directory / "network.jsonl"
        self.process = SwitchProcess(directory, self._trace, HOSTS)
        self._open: list[socket.socket] = []

    def ask(self, do: str, host: int = 1, **more: object) -> list[Record]:
        """Have the switch do something; returns all that it has recorded since it was made."""
        facts = {"fault": 0, "way": "both", "heal": None} | more
        ask(self.directory, do=do, host=host, **facts)
        return self.seen()

    def seen(self) -> list[Record]:
        return read_trace(self._trace)

    def on_host(self, host: int) -> list[str]:
        """What a command must begin with to run on a host."""
        return ["nsenter", f"--net={self.process.namespaces[host]}", "--"]

    def connect(self, here: int, there: int, *, port: int = 5000) -> list[socket.socket]:
        """Both ends of a connection from one host to another: first the one that is ``here``."""
        with self._socket_on(there) as listener:
            listener.bind((address(there), port))
            listener.listen()
            near = self._socket_on(here)
            near.settimeout(10)
            near.connect((address(there), port))
            far, _ = listener.accept()
        far.settimeout(10)
        self._open += [near, far]
        return [near, far]

    def _socket_on(self, host: int) -> socket.socket:
        """A socket that was made on a host stays there, whoever uses it."""
        made: list[socket.socket] = []

        def make() -> None:
            libc = ctypes.CDLL(None, use_errno=True)
            with open(self.process.namespaces[host]) as namespace:
                assert libc.setns(namespace.fileno(), _CLONE_NEWNET) == 0
            made.append(socket.socket())
            made[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        # A network namespace is a thread's own.
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        return made[0]

    def close(self) -> None:
        for each in self._open:
            each.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.process.pid, signal.SIGKILL)
            os.waitpid(self.process.pid, 0)


@pytest.fixture
def network(available: None, tmp_path: Path) -> Iterator[Network]:
    network = Network(tmp_path)
    yield network
    network.close()
