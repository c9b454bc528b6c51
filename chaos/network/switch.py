"""The process that holds the hosts' network namespaces and does what goes wrong between them.

One switch serves one attempt. It runs in the switch's namespace, so no host's death and no host's
cut reaches it, and it writes what it saw to a trace of its own: the judge believes that, and not
the schedule. Nothing of it has a name in the kernel: when this process and the hosts' are dead,
whatever killed them, the kernel removes namespaces, bridge and cables by itself.

Requests: ``partition``, ``throttle``, ``reset`` and ``crash`` of a host, and ``look``; see
`seatrial.chaos.network.control`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from ..launch.processes import command_line, die_with_parent
from ..trace import TraceWriter
from .connections import reset, waiting
from .control import SOCKET, short_path
from .layout import WAYS
from .links import Links

_REQUEST_S = 5.0


@dataclass(frozen=True)
class _Cut:
    """A fault that keeps packets of ``host`` from going ``way`` until ``until`` (monotonic), or for
    good."""

    fault: int
    host: int
    way: str
    until: float | None = None


class Switch:
    """Serves requests from ``listener``; what happens goes to ``trace``."""

    def __init__(self, links: Links, listener: socket.socket, trace: TraceWriter) -> None:
        self._links = links
        self._listener = listener
        self._trace = trace
        self._cuts: list[_Cut] = []
        self._throttled: list[tuple[int, int]] = []  # fault, host

    def serve(self) -> None:
        """Until this process is killed."""
        while True:
            due = min((cut.until for cut in self._cuts if cut.until is not None), default=None)
            self._listener.settimeout(None if due is None else max(0.0, due - time.monotonic()))
            with contextlib.suppress(TimeoutError, BlockingIOError):
                caller, _ = self._listener.accept()
                with caller:
                    self._answer(caller)
            self._heal_those_due()

    def _answer(self, caller: socket.socket) -> None:
        caller.settimeout(_REQUEST_S)
        said = b""
        # A rank that is killed while it asks, or was killed by what it asked for, hears no answer.
        with contextlib.suppress(OSError):
            while not said.endswith(b"\n"):
                if not (data := caller.recv(1 << 16)):
                    return
                said += data
            try:
                answer = self._do(json.loads(said))
            except Exception as error:
                answer = {"failed": f"{type(error).__name__}: {error}"}
                self._trace.record("network", failed=answer["failed"], request=said.decode())
            caller.sendall(json.dumps(answer).encode())

    def _do(self, request: dict[str, object]) -> dict[str, object]:
        if request["do"] == "look":
            self._look()
            return {}
        fault, host = int(str(request["fault"])), int(str(request["host"]))
        match request["do"]:
            case "partition":
                self._cut(_Cut(fault, host, str(request["way"])), request["heal"])
            case "throttle":
                self._links.throttle(host, float(str(request["rate"])))
                self._throttled.append((fault, host))
                self._trace.record("network", fault=fault, host=host, did="throttle")
            case "reset":
                gone = [str(each) for each in reset(self._links.hosts, host)]
                self._trace.record("network", fault=fault, host=host, did="reset", gone=gone)
            case "crash":
                self._crash(fault, host)
            case unknown:
                raise ValueError(f"unknown request {unknown!r}")
        return {}

    def _cut(self, cut: _Cut, heal: object) -> None:
        """For ``heal`` seconds from when it is cut, which takes some milliseconds."""
        self._links.cut(cut.host, cut.way)
        t = time.monotonic()
        until = None if heal is None else t + float(str(heal))
        self._cuts.append(replace(cut, until=until))
        self._trace.record("network", t=t, fault=cut.fault, host=cut.host, did="cut", way=cut.way)

    def _crash(self, fault: int, host: int) -> None:
        inside = self._links.hosts[host]
        lines = {pid: command_line(pid) for pid in inside.processes()}
        killed = [f"{pid} {lines.get(pid, '')}".strip() for pid in inside.kill_all()]
        self._trace.record("network", fault=fault, host=host, did="crash", killed=killed)

    def _heal_those_due(self) -> None:
        now = time.monotonic()
        for cut in [each for each in self._cuts if each.until is not None and each.until <= now]:
            self._cuts.remove(cut)
            try:
                self._heal(cut)
            except Exception as error:
                # The other links are still to be kept. This one stays cut, and the judge is told.
                self._cuts.append(replace(cut, until=None))
                failed = f"{type(error).__name__}: {error}"
                self._trace.record("network", fault=cut.fault, host=cut.host, failed=failed)

    def _heal(self, cut: _Cut) -> None:
        self._note_who_waits(cut)
        if not any((each.host, each.way) == (cut.host, cut.way) for each in self._cuts):
            self._links.heal(cut.host, cut.way)
            self._trace.record("network", fault=cut.fault, host=cut.host, did="heal")

    def _look(self) -> None:
        """Write down what there is to be seen, before the attempt is cleared away."""
        for cut in self._cuts:
            self._note_who_waits(cut)
        for fault, host in self._throttled:
            times = self._links.held_back(host)
            self._trace.record("network", fault=fault, host=host, did="held back", times=times)
        for host, ways in self._links.broken().items():
            way = "both" if "both" in ways or set(ways) == set(WAYS[1:]) else ways[0]
            kept_up = [str(each) for each in waiting(self._links.hosts, host, way)]
            self._trace.record("link", host=host, way=way, waiting=kept_up)

    def _note_who_waits(self, cut: _Cut) -> None:
        kept_up = [str(each) for each in waiting(self._links.hosts, cut.host, cut.way)]
        self._trace.record(
            "network", fault=cut.fault, host=cut.host, did="kept", way=cut.way, waiting=kept_up
        )


def main() -> None:
    """``python -m seatrial.chaos.network.switch DIRECTORY TRACE HOSTS PARENT``

    Says one line of JSON when the network is there: the paths of the hosts' namespaces, or why not.
    """
    die_with_parent(int(sys.argv[4]))
    directory, trace, hosts = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    try:
        links = Links(hosts)
        listener = socket.socket(socket.AF_UNIX)
        with short_path(directory) as near:
            listener.bind(f"{near}/{SOCKET}")
        listener.listen(64)
    except (OSError, RuntimeError) as error:
        print(json.dumps({"failed": str(error)}), flush=True)
        sys.exit(1)
    print(json.dumps({"hosts": [each.path for each in links.hosts]}), flush=True)
    os.close(1)
    Switch(links, listener, TraceWriter(trace)).serve()


if __name__ == "__main__":
    main()
