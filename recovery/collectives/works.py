"""Handles of calls under way that say when they were waited for.

Guarantees: everything that torch asks of a handle is answered by the backend's own. For groups on
the CPU alone: on a GPU a wait returns before the call is done, and its time would mean nothing.
"""

from __future__ import annotations

from datetime import timedelta
from time import monotonic
from typing import Any

from torch._C._distributed_c10d import Work

from .log import IS_WAITED_FOR, CallLog
from .meter import Meter


class ForwardingWork(Work):
    """Another handle's, in all that it is asked."""

    __slots__ = ("inner",)  # one is made for each call, and a dictionary takes its time

    def __init__(self, inner: Work) -> None:
        super().__init__()
        self.inner = inner

    def wait(self, timeout: timedelta | None = None) -> bool:
        return self.inner.wait() if timeout is None else self.inner.wait(timeout)

    def get_future(self) -> Any:
        return self.inner.get_future()

    def get_future_result(self) -> Any:
        return self.inner.get_future_result()  # type: ignore[attr-defined]

    def is_completed(self) -> bool:
        return self.inner.is_completed()

    def is_success(self) -> bool:
        return self.inner.is_success()

    def exception(self) -> Any:
        return self.inner.exception()

    def result(self) -> list[Any]:
        return self.inner.result()

    def synchronize(self) -> None:
        self.inner.synchronize()

    def block_current_stream(self) -> None:
        self.inner.block_current_stream()

    def source_rank(self) -> int:
        return self.inner.source_rank()

    def _source_rank(self) -> int:
        return self.inner._source_rank()

    def _get_op_type(self) -> Any:
        return self.inner._get_op_type()  # type: ignore[attr-defined]


class TimedWork(ForwardingWork):
    """Tells the log how long after its beginning the call was seen to be done."""

    __slots__ = ("_began", "_log", "_number")

    def __init__(self, inner: Work, log: CallLog, number: int, began: float) -> None:
        Work.__init__(self)
        self.inner = inner
        self._log = log
        self._number = number
        self._began = began

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._log.tell(self._number, IS_WAITED_FOR)
        done = self.inner.wait() if timeout is None else self.inner.wait(timeout)
        self._log.tell(self._number, monotonic() - self._began)
        return done


class MeteredWork(TimedWork):
    """Tells a meter as well how long somebody waited for the call."""

    __slots__ = ("_meter", "_token")

    def __init__(self, inner: Work, log: CallLog, number: int, began: float, meter: Meter) -> None:
        super().__init__(inner, log, number, began)
        self._meter = meter
        # Not from its beginning: handing it over hides nothing.
        self._token = meter.began(monotonic())

    def wait(self, timeout: timedelta | None = None) -> bool:
        starved = self._meter.waits()
        start = monotonic()
        done = super().wait(timeout)
        self._meter.waited(self._token, start, monotonic(), starved)
        self._token = -1  # whoever waits again finds it done
        return done

    def get_future(self) -> Any:
        self._meter.took_future(self._token)
        self._token = -1
        return self.inner.get_future()
