"""Processes of a test that are stopped, continued and killed, also at announced points."""

from __future__ import annotations

import os
import pickle
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .announced import once_at


class Process:
    """A forked process that runs ``work``; it can be stopped, continued and killed."""

    def __init__(self, base: Path, work: Callable[[], object]) -> None:
        self._result = base / f"result-{time.monotonic_ns()}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            try:
                signal.alarm(120)
                try:
                    result = work()
                except Exception as error:
                    result = error
                self._result.write_bytes(pickle.dumps(result))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)

    def wait_until_stopped(self) -> None:
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), status

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def result(self) -> Any:
        """What ``work`` returned or raised, or minus the signal that killed it."""
        _, status = os.waitpid(self.pid, 0)
        if os.WIFSIGNALED(status):
            return -os.WTERMSIG(status)
        return pickle.loads(self._result.read_bytes())


@pytest.fixture
def fork(tmp_path: Path) -> Iterator[Callable[[Callable[[], object]], Process]]:
    """``fork(work)``; whatever is left is killed after the test."""
    started: list[Process] = []

    def fork(work: Callable[[], object]) -> Process:
        started.append(Process(tmp_path, work))
        return started[-1]

    yield fork
    for process in started:
        try:
            done, _ = os.waitpid(process.pid, os.WNOHANG)
        except ChildProcessError:
            continue
        if not done:
            process.send(signal.SIGKILL)
            os.waitpid(process.pid, 0)


def signal_at(event: str, edge: str, number: signal.Signals) -> None:
    """Send ``number`` to this process at the first such announcement."""
    once_at(event, edge, lambda: os.kill(os.getpid(), number))
