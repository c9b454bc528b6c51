"""Inside a rank: adds up what the training thread does in each phase, and records it step by step.

Guarantees: one record, of kind ``step-times``, for each step that was completed, written when the
next thing begins: a save, another step, or the end. Time belongs to the innermost phase, and that
of a save within a step to no phase. A fault that strikes at an edge of a phase, a delay say, counts
within it, before or after.

Does not: record a step that was not completed, or time what other threads do. Two listeners, one
before the injector and one after it, because the injector may sleep at either edge.
"""

from __future__ import annotations

import threading

from seatrial.recovery.collectives.clock import ThreadClock
from seatrial.recovery.collectives.meter import Meter

from ..trace import TraceWriter
from .times import CHECK, OUTSIDE, PHASES, RECORD, SAVE, SPANS

_US = 1e6
_ENDS_CHECK = ("step", SAVE, "exit")
"""Events that begin when all that belongs to a step is over, but for a save within the step."""
_NESTS = (*PHASES, SAVE)


class Stopwatch:
    """Of the thread that makes it. `opens` and `closes` are for `seatrial.recovery.probe.listen`,
    what listens in between is timed with the event."""

    def __init__(self, trace: TraceWriter, clock: ThreadClock | None = None) -> None:
        self._clock = clock or ThreadClock()
        self.meter = Meter(self._clock)
        self._trace = trace
        self._step: object = None
        self._sums: dict[str, list[float]] = {}
        self._current = ""
        self._around: list[str] = []
        self._last = (0.0,) * 5
        self._excuse = 0.0

    def opens(self, event: str, edge: str, facts: dict[str, object]) -> None:
        """Listen before anyone else: a phase begins before what strikes it."""
        if threading.get_ident() != self._clock.thread:
            return
        nests = event in _NESTS
        if edge == "after":
            if nests or event == "step":
                # What is slept from here on is no wait for a call.
                self.meter.settle(self._clock.read())
        elif nests and self._current and self._current != CHECK:
            self._around.append(self._current)
            self._turn_to(event)
        elif event in _ENDS_CHECK and self._current:
            self._finish()
        if event == "step" and edge == "before":
            self._step, self._around = facts.get("step"), []
            self._sums = {name: [0.0] * len(self._last) for name in (*SPANS, SAVE)}
            # What was called before a step, to warm up say, hides nothing in it.
            self.meter.end_period(self._clock.read().wall)
            self._excuse = self._excuses()
            self._turn_to(OUTSIDE)

    def closes(self, event: str, edge: str, facts: dict[str, object]) -> None:
        """Listen after everyone else: a phase ends after what strikes it."""
        if edge != "after" or not self._current or threading.get_ident() != self._clock.thread:
            return
        if event in (self._current, *self._around):
            # A phase that was left by an exception has announced no end.
            while self._around and self._current != event:
                self._turn_to(self._around.pop())
            self._turn_to(self._around.pop() if self._around else OUTSIDE)
        elif event == "step":
            self._around = []
            self._turn_to(CHECK)
            self._excuse = self._excuses() - self._excuse
            self.meter.end_period(self._last[0])

    def _excuses(self) -> float:
        """Seconds for which this thread may have waited for what is not its own: a lock or the
        interpreter, held by another thread that had no processor, or the disk of the trace."""
        return self._clock.others_starved() + self._trace.blocked_s

    def _turn_to(self, name: str) -> None:
        """What was done until now belongs to the current span; ``name`` is the next."""
        reading = self._clock.read()
        now = (*reading, self.meter.waited_s, self.meter.hidden_s)
        if self._current:
            sums = self._sums[self._current]
            for index, value in enumerate(now):
                sums[index] += value - self._last[index]
        self._current, self._last = name, now

    def _finish(self) -> None:
        is_complete = self._current == CHECK
        self._turn_to("")
        if is_complete:
            spans = {
                name: [round(value * _US) for value in sums]
                for name, sums in self._sums.items()
                if any(sums)
            }
            blind = {} if self._clock.knows_starved else {"blind": True}
            excuse = round(self._excuse * _US)
            self._trace.record(RECORD, step=self._step, spans=spans, excuse=excuse, **blind)
