"""How a supervisor starts the world, hears of exits, and ends it: the launcher interface.

`LocalLauncher` is the one implementation: a custodian process on this machine that forks, spawns
or runs torchrun. Another (SLURM, Kubernetes) needs the same five methods. Torch-free; used by one
thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

from ..errors import LaunchError, UsageError
from ..inject import pid_file
from .plan import AttemptPlan
from .processes import descendants, kill_descendants

HOSTS = "hosts"
"""torchrun again, with an agent on each of several hosts, which are network namespaces."""
METHODS = ("fork", "spawn", "torchrun", HOSTS)


@dataclass(frozen=True)
class RankExit:
    """How a rank's process ended: ``status`` is its exit code, or minus the signal's number.

    None: the launcher ended it after another rank had failed, and that is all it says.
    """

    rank: int
    status: int | None
    t: float


class Launcher(Protocol):
    """What the supervisor needs of a way to run ranks."""

    def launch(self, plan: AttemptPlan) -> None:
        """Start every rank of the attempt."""

    def exits(self, *, timeout_s: float) -> list[RankExit]:
        """Ranks that have ended since the last call; waits at most ``timeout_s`` for one."""

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank's process if it still runs."""

    def processes(self) -> list[int]:
        """The ids of all processes of the attempt on this machine; none if they are elsewhere."""

    def stop(self) -> list[str]:
        """End every process of the attempt; returns what outlived ranks that left by themselves."""


def _environment(scratch: Path) -> dict[str, str]:
    return os.environ | {
        # One thread each: a process that has started OpenMP's must not be forked.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        # torch.cuda.is_available() at a module's top level would otherwise start the driver in the
        # process that ranks are forked from, without torch knowing.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # Importing torch._dynamo makes this directory; it must not stay behind in /tmp.
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "PYTHONPATH": os.pathsep.join(_import_path()),
    }


def _import_path() -> list[str]:
    """Where this process imports from beyond its interpreter's own places, as ranks must too."""
    own = {Path(place) for place in sysconfig.get_paths().values()}
    return [
        path
        for path in sys.path
        if Path(path).exists() and not own & {Path(path), *Path(path).parents}
    ]


class LocalLauncher:
    """Runs ranks on this machine through a custodian process of its own.

    Args:
        method: ``fork`` (from a warm parent; spawns if the parent must not be forked and says so
            in `note`), ``spawn``, ``torchrun``, or ``hosts``: torchrun on every node, each in a
            network namespace of its own; see `seatrial.chaos.network`.
        scratch: directories that the custodian removes if this process disappears; the first
            also takes what libraries cache.
        shared: one that it removes then if nobody uses it any more; see `launch.shared`.
        preload: modules that the warm parent imports.
    """

    def __init__(
        self,
        *,
        method: str,
        scratch: Sequence[Path],
        shared: Path | None = None,
        preload: tuple[str, ...] = (),
    ) -> None:
        if method not in METHODS:
            raise UsageError(f"unknown launcher {method!r}; choose one of {', '.join(METHODS)}")
        self.method = method
        self.note = ""
        self._plan: AttemptPlan | None = None
        self._input = b""
        self._asked = 0
        self._pending: list[RankExit] = []
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *("-m", "seatrial.chaos.launch.custodian"),
                    str(theirs.fileno()),
                    *("" if shared is None else str(shared), *map(str, scratch)),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=_environment(scratch[0]),
            )
        if method in ("fork", HOSTS):
            modules = " ".join(preload) if method == "fork" else ""
            try:
                reason = self._ask(do="warm", method=method, modules=modules)["unsafe"]
            except LaunchError as error:
                self.close()
                said = str(error).partition("\n")[0]
                if not said.startswith("warm: "):
                    raise
                said = said.removeprefix("warm: ")
                raise UsageError(f"the job's module cannot be imported: {said}") from error
            except BaseException:  # an interrupt; who imports would hear of it seconds later
                with contextlib.suppress(TimeoutError):
                    kill_descendants(self._process.pid)
                self._process.kill()
                self.close()
                raise
            if reason and method == HOSTS:
                self.close()
                raise LaunchError(f"torchrun's agents cannot be forked: {reason}")
            if reason:
                self.method = "spawn"
                self.note = f"ranks are spawned, not forked: {reason}"

    def __enter__(self) -> LocalLauncher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def launch(self, plan: AttemptPlan) -> None:
        plan = replace(plan, hosts=self.method == HOSTS)
        plan.make_directories()
        path = Path(plan.directory) / "plan.json"
        path.write_text(plan.to_json())
        self._plan = plan
        self._ask(do="launch", method=self.method, plan=str(path))

    def exits(self, *, timeout_s: float) -> list[RankExit]:
        if not self._pending:
            self._read(timeout_s)
        found, self._pending = self._pending, []
        return found

    def signal(self, rank: int, number: int) -> None:
        assert self._plan is not None
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            pid = int(pid_file(Path(self._plan.directory), rank).read_text())
            if pid in descendants(self._process.pid):
                os.kill(pid, number)

    def processes(self) -> list[int]:
        return descendants(self._process.pid)

    def stop(self) -> list[str]:
        strays = self._ask(do="stop")["strays"]
        self._pending.clear()
        assert isinstance(strays, list)
        return strays

    def close(self) -> None:
        """End the custodian and everything below it. Safe to call twice."""
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=15)
            return
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def _ask(self, **request: str) -> dict[str, object]:
        # Numbered, because a KeyboardInterrupt may leave an earlier answer unread.
        self._asked += 1
        request["number"] = str(self._asked)
        try:
            self._control.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise self._gone() from error
        while True:
            if (answer := self._read(None)) and answer["to"] == request["number"]:
                if failed := answer.get("failed"):
                    raise LaunchError(f"{request['do']}: {failed}\n{answer['detail']}")
                return answer

    def _read(self, timeout_s: float | None) -> dict[str, object] | None:
        """Take in messages; exits are kept for later, an answer is returned."""
        while b"\n" not in self._input:
            if not select.select([self._control], [], [], timeout_s)[0]:
                return None
            data = self._control.recv(1 << 20)
            if not data:
                raise self._gone()
            self._input += data
        while b"\n" in self._input:
            line, _, self._input = self._input.partition(b"\n")
            message: dict[str, object] = json.loads(line)
            if "exited" not in message:
                return message
            rank, status = message["exited"], message["status"]
            assert isinstance(rank, int)
            assert status is None or isinstance(status, int)
            self._pending.append(RankExit(rank, status, time.monotonic()))
        return None

    def _gone(self) -> LaunchError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)  # its socket closes a moment before it is gone
        return LaunchError(
            f"the process that owns the ranks ended unexpectedly (status {self._process.poll()}); "
            "was it killed, or is the machine out of memory?"
        )
