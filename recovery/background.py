"""A save that goes on while training does: one thread, one handle, at most one at a time.

Guarantees: `SaveHandle.wait` returns what the save returned or raises what it raised; an error that
nobody waited for is logged at once and raised by the next call of the store, once. A process that
ends normally finishes the save first; one that is killed leaves the step unpublished.

Does not: touch the state that is trained, its random numbers, or collectives. Called by the store.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from .manifest import Manifest

__all__ = ["Background", "SaveHandle"]

_log = logging.getLogger(__name__)


class SaveHandle:
    """A save in flight or over; made by `CheckpointStore.save_async`."""

    def __init__(self, step: int, work: Callable[[], Manifest]) -> None:
        self.step = step
        self._work = work
        self._over = threading.Event()
        self._manifest: Manifest | None = None
        self._error: BaseException | None = None
        self._delivered = False
        # Not a daemon: the interpreter waits for it, so the last save of a run is not lost.
        self._thread = threading.Thread(target=self._run, name="seatrial-save", daemon=False)

    def done(self) -> bool:
        """Whether the save is over, well or not."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> Manifest:
        """Wait until the step is published and durable; its manifest, equal on all ranks.

        Raises:
            SaveError: as `CheckpointStore.save`.
            TimeoutError: the save is not over after ``timeout_s`` seconds; it goes on.
        """
        if not self._over.wait(timeout_s):
            raise TimeoutError(f"the save of step {self.step} is not over after {timeout_s:g} s")
        self._delivered = True
        if self._error is not None:
            raise self._error
        assert self._manifest is not None
        return self._manifest

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError:
            self._run()  # No thread is to be had, and the other ranks count on this one.

    def settle(self) -> None:
        """Wait, and raise the save's error unless `wait` has raised it before."""
        self._over.wait()
        if self._error is not None and not self._delivered:
            self.wait()

    def _run(self) -> None:
        try:
            self._manifest = self._work()
        except BaseException as error:
            self._error = error
            _log.error("the background save of step %d failed: %s", self.step, error)
        finally:
            self._over.set()


class Background:
    """Runs one save at a time."""

    def __init__(self) -> None:
        self._latest: SaveHandle | None = None

    def settle(self) -> None:
        """Wait for the save in flight, if any, and raise its error if nobody has seen it."""
        latest, self._latest = self._latest, None
        if latest is not None:
            latest.settle()

    def start(self, step: int, work: Callable[[], Manifest]) -> SaveHandle:
        """Run ``work`` in the background; the one before must have been settled."""
        self._latest = SaveHandle(step, work)
        self._latest.start()
        return self._latest
