"""Network namespaces without names: the kernel removes each with the last process that holds it.

Guarantees: nothing here outlives the process that made it and those that it put inside; nothing is
made in the namespace that the process came from. Needs root, nsenter (util-linux) and iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_COMMAND_S = 20.0
_KILL_S = 10.0
PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
"""Where programs of the system are looked for: those of administrators too."""


def program(name: str) -> str | None:
    """Where a program of the system is."""
    return shutil.which(name, path=PATH)


class Namespace:
    """A network namespace, held open by this process. Made by `enter_new_namespace`."""

    def __init__(self, descriptor: int) -> None:
        self._identity = os.fstat(descriptor).st_ino
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"

    def run(self, *command: str, said: str = "") -> str:
        """Run a command inside, with ``said`` as its input; returns its output.

        Raises:
            RuntimeError: it failed; the message is what it said.
        """
        done = subprocess.run(
            ["nsenter", f"--net={self.path}", "--", *command],
            input=said,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            env=os.environ | {"PATH": PATH},
            check=False,
        )
        if done.returncode:
            why = done.stderr.strip() or f"status {done.returncode}"
            raise RuntimeError(f"{' '.join(command)}: {why}")
        return done.stdout

    def processes(self) -> list[int]:
        """Every process inside that runs."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):  # gone, or a zombie, which is in none
                    if (entry / "ns" / "net").stat().st_ino == self._identity:
                        found.append(int(entry.name))
        return found

    def kill_all(self) -> list[int]:
        """SIGKILL every process inside; returns them.

        All are frozen first, so that none sees another die and leaves in its own way.

        Raises:
            TimeoutError: a process survives SIGKILL.
        """
        frozen: set[int] = set()
        while new := set(self.processes()) - frozen:  # a process may start others meanwhile
            _send_all(signal.SIGSTOP, new)
            frozen |= new
        deadline = time.monotonic() + _KILL_S
        while alive := self.processes():
            _send_all(signal.SIGKILL, alive)
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {alive} survive SIGKILL")
            time.sleep(0.001)
        return sorted(frozen)


def enter_new_namespace() -> Namespace:
    """Move this process, which must have one thread, to a network namespace of its own.

    Raises:
        OSError: the kernel has none, or this process may not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"unshare: {os.strerror(code)}")
    with contextlib.suppress(OSError):
        # No address but ours, and no packet but the job's.
        Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
    return Namespace(os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC))


def enter(path: str) -> None:
    """Move this process, which must have one thread, to the network namespace at ``path``.

    Raises:
        OSError: there is none, or this process may not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path) as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"setns: {os.strerror(code)}")


def _send_all(number: signal.Signals, pids: set[int] | list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
