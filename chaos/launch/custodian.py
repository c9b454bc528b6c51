"""The process that owns every rank: it starts them, reports how each ended, and leaves nobody.

One custodian serves one supervisor for its whole life. It imports torch and the job's modules
once, stays single-threaded, and forks each rank from that warm image (0.03 s to the first
all-reduce of two ranks, where a cold torchrun takes 3.4 s). It never opens a `TCPStore`, which
forked ranks would inherit and hang on.

Guarantees: every process that descends from a rank, orphans included, is dead when ``stop`` is
answered; if the supervisor disappears, whatever killed it, the custodian kills everything, removes
the scratch directory and exits. Ranks die with the custodian. So does the switch between hosts, and
with them the hosts' network namespaces.

Requests and answers are JSON lines on a socket: see `seatrial.chaos.launch.launcher`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..errors import LaunchError
from ..network.namespaces import enter
from ..network.process import SwitchProcess
from ..powerloss.mounts import unmount_below
from .exits import torchrun_exits
from .plan import AttemptPlan
from .processes import adopt_orphans, command_line, descendants, die_with_parent, kill_descendants
from .shared import nobody_uses

_AGENT = "seatrial.chaos.launch.torchrun_agent"
_LEAVING_S = 2.0
_LOOK_S = 1.0
_WARM = ("seatrial.chaos.launch.worker", "numpy.random", "torch._dynamo")
"""What a rank would otherwise import: torch loads dynamo (1.5 s) when an optimizer is made."""


@dataclass(frozen=True)
class _Runs:
    """What a process runs: one rank, or as a torchrun ``agent`` those of ``host``, or all."""

    ranks: range
    agent: bool = False
    host: int | None = None


class Custodian:
    """Serves requests from ``control`` until it closes."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._input = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._plan: AttemptPlan | None = None
        self._running: dict[int, tuple[int, _Runs]] = {}  # by pid, with a pidfd
        self._switch: SwitchProcess | None = None

    def serve(self) -> None:
        """Answer requests and report exits until the supervisor closes its end, or is gone.

        What it has forked may hold that end open for longer than it lives.
        """
        supervisor = os.getppid()
        while os.getppid() == supervisor:
            for key, _ in self._selector.select(_LOOK_S):
                if key.fileobj is self._control:
                    data = self._control.recv(1 << 20)
                    if not data:
                        return
                    self._input += data
                else:
                    self._reap(key.data)
            *lines, self._input = self._input.split(b"\n")
            for line in lines:
                self._answer(json.loads(line))

    def _say(self, **message: object) -> None:
        """Send a message; an answer carries the number of its request."""
        self._control.sendall(json.dumps(message).encode() + b"\n")

    def _answer(self, request: dict[str, str]) -> None:
        try:
            match request["do"]:
                case "warm":
                    needed = (_AGENT,) if request["method"] == "hosts" else _WARM
                    unsafe = _warm_up([*needed, *request["modules"].split()])
                    self._say(to=request["number"], unsafe=unsafe)
                case "launch":
                    self._launch(request["method"], Path(request["plan"]))
                    self._say(to=request["number"])
                case "stop":
                    self._say(to=request["number"], strays=self._stop())
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
            self._say(to=request["number"], failed=failed, detail=traceback.format_exc())

    def _launch(self, method: str, plan_file: Path) -> None:
        self._plan = plan = AttemptPlan.from_json(plan_file.read_text())
        if method == "torchrun":
            pid = _start([_AGENT, str(plan_file), str(os.getpid())], Path(plan.directory))
            self._watch(pid, _Runs(range(plan.world.ranks), agent=True))
            return
        if method == "hosts":
            self._launch_on_hosts(plan, plan_file)
            return
        for rank in range(plan.world.ranks):
            if method == "fork":
                pid = self._fork(partial(_run_rank, plan, rank))
            else:
                worker = "seatrial.chaos.launch.worker"
                command = [worker, str(plan_file), str(rank), str(os.getpid())]
                pid = _start(command, Path(plan.directory))
            self._watch(pid, _Runs(range(rank, rank + 1)))

    def _launch_on_hosts(self, plan: AttemptPlan, plan_file: Path) -> None:
        directory, each = Path(plan.directory), plan.world.ranks_per_node
        self._switch = SwitchProcess(directory, plan.network_file, plan.world.nodes)
        for host in range(plan.world.nodes):
            pid = self._fork(partial(_run_agent, plan_file, host, self._switch.namespaces[host]))
            ranks = range(host * each, (host + 1) * each)
            self._watch(pid, _Runs(ranks, agent=True, host=host))

    def _watch(self, pid: int, runs: _Runs) -> None:
        pidfd = os.pidfd_open(pid)
        self._running[pid] = (pidfd, runs)
        self._selector.register(pidfd, selectors.EVENT_READ, pid)

    def _fork(self, run: Callable[[], int]) -> int:
        """A child that runs ``run`` in the warm image, and leaves with the status it returns."""
        custodian = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            os.setsid()
            die_with_parent(custodian)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._control.close()
            self._selector.close()
            for pidfd, _ in self._running.values():
                os.close(pidfd)
            status = run()
        finally:
            os._exit(status)

    def _reap(self, pid: int) -> None:
        pidfd, runs = self._running.pop(pid)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, raw = os.waitpid(pid, 0)
        status = os.waitstatus_to_exitcode(raw)
        if not runs.agent:
            self._say(exited=runs.ranks[0], status=status)
            return
        assert self._plan is not None
        for rank, code in torchrun_exits(self._plan, runs.ranks, runs.host, status).items():
            self._say(exited=rank, status=code)

    def _stop(self) -> list[str]:
        """Kill whatever is left; what outlives ranks that all left by themselves is a stray."""
        own = os.getpid()
        ours = set()
        if self._switch is not None:
            ours = {self._switch.pid}
            # A switch that is gone has nothing to show, and the judge will say so.
            with contextlib.suppress(LaunchError, OSError):
                self._switch.look()
        strays = [] if self._running else [command_line(pid) for pid in _lasting(own, ours)]
        kill_descendants(own)
        if self._switch is not None:
            self._switch.forget()
            self._switch = None
        for pidfd, _ in self._running.values():
            self._selector.unregister(pidfd)
            os.close(pidfd)
        self._running.clear()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        return strays


def _run_rank(plan: AttemptPlan, rank: int) -> int:
    from .worker import leave, run_rank

    status = run_rank(plan, rank)
    leave(status)
    return status


def _run_agent(plan_file: Path, host: int, namespace: str) -> int:
    with (plan_file.parent / "launch.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        enter(namespace)
        from .torchrun_agent import run_agent

        run_agent(plan_file, host)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _warm_up(modules: Collection[str]) -> str:
    """Import what ranks need; returns why this process must not be forked, or nothing."""
    for name in modules:
        module = importlib.import_module(name)
        # What a job's module wants to have done once, not by every rank of every attempt.
        getattr(module, "warm_up", lambda: None)()
    import torch

    gc.collect()
    gc.freeze()  # so that a collection in a rank does not copy the shared pages
    if torch.cuda.is_initialized():
        return "importing the job initialised CUDA, which does not survive a fork"
    if _is_spoilt_by_cuda():
        return "importing the job started the CUDA driver, which does not survive a fork"
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        return f"importing the job started {threads - 1} thread(s), which do not survive a fork"
    return ""


def _is_spoilt_by_cuda() -> bool:
    """Whether a fork of this process could not use CUDA, although torch has not initialised it.

    Counting GPUs is enough where NVML is missing. Torch knows of it in the child alone.
    """
    import torch

    cannot = getattr(torch._C, "_cuda_isInBadFork", None)  # of a torch built for CUDA
    if cannot is None:
        return False
    pid = os.fork()
    if pid == 0:
        os._exit(1 if cannot() else 0)
    return os.waitpid(pid, 0)[1] != 0


def _lasting(pid: int, ours: Collection[int]) -> list[int]:
    """Descendants but ``ours`` that are still there after a moment: Python's resource tracker, for
    one, needs a tenth of a second to notice that its process has left in good order."""
    deadline = time.monotonic() + _LEAVING_S
    while (found := set(descendants(pid)) - set(ours)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return sorted(found)


def _start(command: list[str], directory: Path) -> int:
    """Run a module with arguments in a fresh interpreter."""
    with (directory / "launch.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    # The custodian reaps by pid itself; Popen must not warn about a child it never waited for.
    process.returncode = 0
    return process.pid


def main() -> None:
    """``python -m seatrial.chaos.launch.custodian SOCKET SHARED SCRATCH…``; SHARED may be empty."""
    # Ends with its supervisor, not before. Handlers rather than SIG_IGN, which an exec inherits.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: None)
    adopt_orphans()
    control = socket.socket(fileno=int(sys.argv[1]))
    shared, *scratch = sys.argv[2:]
    supervisor = os.getppid()
    try:
        with contextlib.suppress(ConnectionError):
            Custodian(control).serve()
    finally:
        kill_descendants(os.getpid())
        if os.getppid() != supervisor:
            for directory in scratch:
                _remove(directory)
            # The others that use it remove what is their own; the last of them removes the rest.
            if shared and nobody_uses(Path(shared)):
                _remove(shared)


def _remove(directory: str) -> None:
    unmount_below(directory)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
