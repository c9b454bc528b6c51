"""When an attempt counts as hung: how long its ranks were silent, and after which faults.

Guarantees: a deadline is never shorter than what the caller gave for the case, and nothing shorter
than `Limits.silence_s` is asked for unless a fault has struck after which ranks must hang. The
shortest, `Limits.still_s`, is asked only with evidence that no process of the attempt does
anything: see `seatrial.chaos.stillness`. Torch-free.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .actions import HANGING
from .ledger import Strike
from .stillness import Stillness, is_awake
from .trace import read_last, read_trace

_START_S = 120.0  # importing torch in cold ranks on a busy machine records nothing
_STEP_BYTES = 4 << 20  # the record of a step has the fingerprint of every tensor
_LOOK_S = 0.1
_SILENCING = ("stop", "partition")  # until they are over, if they ever are
_HANGS_AT_ONCE = ("stop", *(name for name in HANGING if name != "reorder"))
"""A call that changes places with another is held back for a while first."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When to give up: on an attempt after ``silence_s`` without any event, on the run after
    ``max_restarts`` further attempts, on either when ``total_s`` is over.

    Once a ``stop`` has struck, or a ``partition``, a hang is what must follow if nothing ends it;
    ``stopped_silence_s`` is enough.
    So it is where a bent collective may leave ranks waiting for each other, until each has recorded
    a step after it. Then ``still_s`` of silence are enough, too, in which no process of the attempt
    did anything, if nothing else has struck and every rank has begun; see `Silence`. None if that
    is not to be asked.
    """

    max_restarts: int
    silence_s: float
    stopped_silence_s: float
    total_s: float = 3600.0
    still_s: float | None = None


class Silence:
    """Of the ranks that write ``traces``; ``processes`` gives the ids of all their processes.

    ``is_broken``: something was recorded when this was asked last. ``is_explained``: a hang had to
    follow of what has struck.
    """

    def __init__(
        self, traces: Sequence[Path], limits: Limits, processes: Callable[[], Sequence[int]]
    ) -> None:
        self._traces = traces
        self._limits = limits
        self._processes = processes
        self._size_bytes = -1
        self._heard = self._looked = time.monotonic()
        self._lasts_s = 0.0
        self._still_s = 0.0
        self._stillness = Stillness()
        self._began = False
        self.is_broken = False
        self.is_explained = False

    def __str__(self) -> str:
        still = f", and no process ran for {self._still_s:.1f} s" if self._still_s else ""
        return f"no rank did anything for {self._lasts_s:.1f} s{still}"

    def is_a_hang(self, strikes: Sequence[Strike]) -> bool:
        """Ask again and again; ``strikes`` are those of the attempt so far."""
        sizes = [_size_bytes(path) for path in self._traces]
        now = time.monotonic()
        self.is_broken = sum(sizes) != self._size_bytes
        if self.is_broken:
            self._size_bytes, self._heard, self._stillness = sum(sizes), now, Stillness()
        self._lasts_s = now - self._heard
        if not all(sizes):
            return self._lasts_s > _START_S
        if self._lasts_s > self._limits.silence_s:
            return True
        if self._lasts_s < _LOOK_S or now - self._looked < _LOOK_S:
            return False
        self._looked = now
        if not self._must_follow(strikes) or self._somebody_leaves():
            return False
        return self._lasts_s > self._limits.stopped_silence_s or self._is_still(strikes, now)

    def _must_follow(self, strikes: Sequence[Strike]) -> bool:
        """Whether a hang is what must follow of what has struck."""
        self.is_explained = any(
            (each.action in _SILENCING and each.resume is None)
            or (each.action in HANGING and not self._went_on_after(each))
            for each in strikes
        )
        return self.is_explained

    def _went_on_after(self, strike: Strike) -> bool:
        """Whether every rank has completed the step of the strike, or a later one, since then, or
        all that it had to do."""
        return all(self._rank_went_on(path, strike) for path in self._traces)

    @staticmethod
    def _rank_went_on(trace: Path, strike: Strike) -> bool:
        ended = read_last(trace, "ended")
        if ended is not None and not ended["status"]:
            return True
        step = read_last(trace, "step", window_bytes=_STEP_BYTES)
        return (
            step is not None
            and float(str(step["t"])) > strike.t
            and int(str(step["step"])) >= (strike.step or 0)
        )

    def _somebody_leaves(self) -> bool:
        """Whether a rank has done all that it will do, or failed, and its process is still there.

        What a process does last of all, such as to wait for its threads, is recorded by nobody.
        """
        return any(
            is_awake(process) for process in map(_process_that_leaves, self._traces) if process
        )

    def _is_still(self, strikes: Sequence[Strike], now: float) -> bool:
        """Whether no process has done anything for long enough, after strikes that must hang."""
        limit_s = self._limits.still_s
        if limit_s is None or not self._all_began():
            return False
        # Whoever sleeps through a delay, say, is still and does not hang.
        if any(each.action not in _HANGS_AT_ONCE or each.resume for each in strikes):
            return False
        self._still_s = self._stillness.lasts_s(self._processes(), now)
        return self._still_s >= limit_s

    def _all_began(self) -> bool:
        self._began = self._began or all(
            any(record["kind"] == "began" for record in read_trace(path)) for path in self._traces
        )
        return self._began


def _process_that_leaves(trace: Path) -> int | None:
    event = read_last(trace, "event")
    leaves = event is not None and event["event"] == "exit"
    if leaves or read_last(trace, "error") or read_last(trace, "ended"):
        process = next((each for each in read_trace(trace) if each["kind"] == "process"), None)
        return None if process is None else int(str(process["pid"]))
    return None


def _size_bytes(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
