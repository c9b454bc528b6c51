"""Handles of calls under way that say when they were waited for.

Guarantees: everything that torch asks of a handle is answered by the backend's own. For groups on
the CPU alone: on a GPU a wait returns before the call is done, and its time would mean nothing.
"""

from __future__ import annotations

from datetime import timedelta
from time import monotonic
from typing import Any

from torch._C._distributed_c10d import Work

from .log import NUMBER, OUTCOME, WAITED_FOR
from .meter import Meter


class ForwardingWork(Work):
    """Another handle's, ``inner``'s, in all that it is asked. Whoever makes one sets it."""

    __slots__ = ("inner",)  # one is made for each call, and a dictionary takes its time
    inner: Work

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
    """Tells the log how long after its beginning the call was seen to be done.

    Whoever makes one sets its attributes too, as a constructor takes half a microsecond: ``words``
    and ``seconds`` of the log, the ``number`` of the call, the word where its ``record`` begins,
    and when it ``began``.
    """

    __slots__ = ("began", "number", "record", "seconds", "words")
    began: float
    number: int
    record: int
    seconds: memoryview[float]
    words: memoryview[int]

    def wait(self, timeout: timedelta | None = None) -> bool:
        record, number, words = self.record, self.number, self.words
        # Else a newer call has taken its place.
        if words[record + NUMBER] == number:
            self.seconds[record + OUTCOME] = WAITED_FOR
        done = self.inner.wait() if timeout is None else self.inner.wait(timeout)
        if words[record + NUMBER] == number:
            self.seconds[record + OUTCOME] = monotonic() - self.began
        return done


class MeteredWork(TimedWork):
    """Tells a meter as well how long somebody waited for the call."""

    __slots__ = ("_meter", "_token")
    _meter: Meter
    _token: int

    @classmethod
    def of(cls, meter: Meter) -> MeteredWork:
        """One for a call that is under way from now on: handing it over hides nothing."""
        work = cls()
        work._meter = meter
        work._token = meter.began(monotonic())
        return work

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
