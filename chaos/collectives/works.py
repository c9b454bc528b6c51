"""Handles that a bent call returns: already done, held back, never done, or with something after.

Guarantees: each serves those who wait and those who ask for a future, as DDP's reducer does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from seatrial.recovery.collectives.works import ForwardingWork


class Done(Work):
    """A call that was never made, and leaves its tensors as they are."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(list(tensors))

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


class Never(Work):
    """A call that nobody hears of again."""

    def __init__(self) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def wait(self, timeout: timedelta | None = None) -> bool:
        while True:
            time.sleep(60)

    def is_completed(self) -> bool:
        return False

    def get_future(self) -> Any:
        return self._future


class FollowedUp(ForwardingWork):
    """A call after which ``then`` is done once, before anyone sees the result."""

    def __init__(self, inner: Work, then: Callable[[], None]) -> None:
        super().__init__()
        self.inner = inner
        self._then = then
        self._lock = threading.Lock()
        self._followed = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        done = super().wait(timeout)
        self._follow()
        return done

    def get_future(self) -> Any:
        return _chained(self.inner, self._follow)

    def _follow(self) -> None:
        with self._lock:
            if not self._followed:
                self._followed = True
                self._then()


_PATIENCE_S = 2.0


class Held(Work):
    """A call that is made when it is told to, or when somebody waits for it.

    ``waited`` is called in the latter case. Who waits for a future, as the reducer of DDP does in
    C++, cannot be seen: where no other call comes for `_PATIENCE_S`, somebody is taken to wait.
    """

    def __init__(self, issue: Callable[[], Work], waited: Callable[[], None]) -> None:
        super().__init__()
        self._issue = issue
        self._waited = waited
        self._made: Work | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._lock = threading.Lock()
        self._is_made = threading.Event()

    def make(self) -> Work:
        """Make the call now, if it was not made yet."""
        with self._lock:
            if self._made is None:
                self._made = self._issue()
                self._is_made.set()
                if self._future is not None:
                    _pass_on(self._made, self._future)
            return self._made

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._made is None:
            self._waited()
        made = self.make()
        return made.wait() if timeout is None else made.wait(timeout)

    def is_completed(self) -> bool:
        return self._made is not None and self._made.is_completed()

    def get_future(self) -> Any:
        if self._made is not None:
            return self._made.get_future()
        if self._future is None:
            self._future = torch.futures.Future()
            threading.Thread(target=self._make_in_the_end, daemon=True).start()
        return self._future

    def _make_in_the_end(self) -> None:
        if not self._is_made.wait(_PATIENCE_S):
            self._waited()
            self.make()


def _chained(work: Work, first: Callable[[], None]) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    _pass_on(work, future, first)
    return future


def _pass_on(
    work: Work, future: torch.futures.Future[Any], first: Callable[[], None] = lambda: None
) -> None:
    def done(finished: torch.futures.Future[Any]) -> None:
        try:
            value = finished.value()
            first()
        except Exception as error:  # the waiter has to hear of it
            future.set_exception(error)
        else:
            future.set_result(value)

    work.get_future().add_done_callback(done)
