"""How long a thread waited for its calls, and how long it went on while some were under way.

Guarantees: `Meter.waited_s` is the time that its thread spent in waits for calls; `Meter.hidden_s`
that in which it did something else while it had yet to wait for at least one. Never both at once,
and a wait is without the time in which the thread could have gone on and had no processor.

Does not know when a call was done: one that is done long before somebody waits for it counts as
hidden until then, so `hidden_s` is the most that can have been overlapped. Whoever takes a call's
future, as DDP's reducer does, waits for it in C++, unseen. Such a wait is taken to be what the
thread did, from the last future taken until `Meter.settle`, neither on a processor nor ready for
one. Calls and waits of other threads are not counted.
"""

from __future__ import annotations

import threading

from .clock import Reading, ThreadClock

_NOBODY = -1
_LONG_S = 1e-4  # in less, nothing worth the reading can have happened


class Meter:
    """Of the thread whose ``clock`` is given."""

    def __init__(self, clock: ThreadClock) -> None:
        self.waited_s = 0.0
        self.hidden_s = 0.0
        self._clock = clock
        self._period = 0
        self._under_way = 0
        self._futures = 0
        self._since = 0.0
        self._taken: tuple[Reading, float] | None = None

    def began(self, t: float) -> int:
        """A call began at ``t``; what to say of it afterwards."""
        if threading.get_ident() != self._clock.thread:
            return _NOBODY
        if not self._under_way:
            self._since = t
        self._under_way += 1
        return self._period

    def waits(self) -> float:
        """A wait begins; what to say of it to `waited`."""
        # While the call is under way anyway.
        return self._clock.starved() if threading.get_ident() == self._clock.thread else 0.0

    def waited(self, token: int, start: float, end: float, starved: float) -> None:
        """Somebody waited for a call, from ``start`` to ``end``; ``token`` is of `began`, and
        ``starved`` of `waits`."""
        if threading.get_ident() != self._clock.thread:
            return
        self._goes_on_until(start)
        self.waited_s += end - start
        if end - start > _LONG_S:
            # A thread that could go on and has no processor waits for that, not for the call.
            self.waited_s -= min(end - start, self._clock.starved() - starved)
        self._since = end
        if token == self._period and self._under_way:
            self._under_way -= 1

    def took_future(self, token: int) -> None:
        """Somebody took the future of a call, and will wait for it unseen."""
        if threading.get_ident() != self._clock.thread or token != self._period:
            return
        self._futures += 1
        self._taken = self._clock.read(), self.waited_s

    def settle(self, now: Reading) -> None:
        """All futures were waited for by ``now``, which is the clock's reading."""
        if self._taken is None:
            return
        then, waited_s = self._taken
        spent = (now.cpu - then.cpu) + (now.starved - then.starved) + (self.waited_s - waited_s)
        unseen_s = max(0.0, now.wall - then.wall - spent)
        self._goes_on_until(now.wall - unseen_s)
        self.waited_s += unseen_s
        self._since = now.wall
        self._under_way = max(0, self._under_way - self._futures)
        self._futures, self._taken = 0, None

    def end_period(self, t: float) -> None:
        """Forget calls that nobody has waited for until ``t``, such as at the end of a step."""
        self._goes_on_until(t)
        self._period += 1
        self._under_way = self._futures = 0
        self._taken = None

    def _goes_on_until(self, t: float) -> None:
        if self._under_way:
            self.hidden_s += max(0.0, t - self._since)
            self._since = t
