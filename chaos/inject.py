"""Listens to a rank's events, writes each to the trace, and strikes where the schedule says.

Guarantees: an event is in the trace before any fault strikes at it; a strike is in the ledger
before it happens; counting is exact and per rank, and starts anew in every attempt. Signals aimed
at several ranks are sent by the first of them that reaches the event, itself last, as when a whole
node is lost. Runs inside the rank, in the thread that announces the event; threads share counts,
and each has a step of its own, so that a save in the background and the training do not mix theirs.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from .damage import damage_newest
from .errors import InjectedError
from .exhaust import exhaust_memory
from .fault import DAMAGE, Fault
from .ledger import Ledger, Strike
from .schedule import Schedule
from .trace import TraceWriter

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where the injector runs: its rank, the attempt, and how to reach its peers and the store."""

    rank: int
    world_size: int
    ranks_per_node: int
    attempt: int
    store: str
    pids: Path


def pid_file(directory: Path, rank: int) -> Path:
    """Where a rank of this attempt leaves its process id."""
    return directory / f"rank{rank}.pid"


class Injector:
    """The listener of one rank in one attempt; see `seatrial.recovery.probe.listen`."""

    def __init__(
        self, schedule: Schedule, position: Position, ledger: Ledger, trace: TraceWriter
    ) -> None:
        self._schedule = schedule
        self._position = position
        self._ledger = ledger
        self._trace = trace
        self._thread = threading.local()
        self._counting = threading.Lock()
        self._counts = [0] * len(schedule.faults)
        self._targets = [
            fault.targets(world_size=position.world_size, ranks_per_node=position.ranks_per_node)
            for fault in schedule.faults
        ]

    def __call__(self, event: str, edge: str, facts: dict[str, object]) -> None:
        step = facts.get("step")
        if isinstance(step, int):
            self._thread.step = step
        known = {name: value for name, value in facts.items() if name != "data"}
        self._trace.record("event", event=event, edge=edge, **{"step": self._step, **known})
        # All count before one strikes: the strike may raise.
        with self._counting:
            faults = enumerate(self._schedule.faults)
            due = [(i, f) for i, f in faults if self._is_due(i, f, event, edge, facts)]
        for index, fault in due:
            self._strike(index, fault, event, edge, facts)

    @property
    def _step(self) -> int | None:
        step: int | None = getattr(self._thread, "step", None)
        return step

    def _is_due(
        self, index: int, fault: Fault, event: str, edge: str, facts: dict[str, object]
    ) -> bool:
        if fault.when != edge or self._position.rank not in self._targets[index]:
            return False
        if fault.attempt not in (None, self._position.attempt):
            return False
        if not fault.at.matches(event, self._step):
            return False
        if fault.record not in (None, facts.get("record")):
            return False
        self._counts[index] += 1
        # What is damaged for good is so whenever it is read.
        return self._counts[index] == fault.nth or fault.is_in_the_data

    def _strike(
        self, index: int, fault: Fault, event: str, edge: str, facts: dict[str, object]
    ) -> None:
        own = self._position.rank
        together = fault.action in _SIGNALS
        claimed: list[int] = []
        for rank in self._targets[index] if together else (own,):
            strike = self._describe(index, fault, rank, event, edge)
            if not self._ledger.claim(strike, persistent=fault.persistent):
                # Whoever claims the first target strikes them all: two that share the targets
                # could kill each other before either is done.
                break
            claimed.append(rank)
        if not claimed and not fault.is_in_the_data:
            return
        self._trace.record("strike", fault=str(fault), ranks=claimed)
        if together:
            self._signal_all(fault, claimed)
        elif fault.action in DAMAGE:
            what = damage_newest(self._position.store, fault, own, seed=self._schedule.seed + index)
            self._trace.record(
                "damage", fault=index, step=what.step, file=what.file, change=what.change
            )
        elif fault.action == "spoil":
            self._spoil(index, facts)
        elif fault.action == "delay":
            time.sleep(fault.seconds)
        elif fault.action == "raise":
            raise InjectedError(f"injected by the fault '{fault}'")
        elif fault.action == "exit":
            os._exit(fault.code)
        elif fault.action == "oom":
            exhaust_memory()

    def _spoil(self, index: int, facts: dict[str, object]) -> None:
        data, record = facts.get("data"), facts.get("record")
        if isinstance(data, bytearray) and data:
            choice = random.Random(f"{self._schedule.seed + index}/{record}")
            data[choice.randrange(len(data))] ^= 1 << choice.randrange(8)
            self._trace.record("spoilt", fault=index, record=record, step=self._step)

    def _describe(self, index: int, fault: Fault, rank: int, event: str, edge: str) -> Strike:
        return Strike(
            fault=index,
            action=fault.action,
            rank=rank,
            attempt=self._position.attempt,
            event=event,
            edge=edge,
            step=self._step,
            t=Ledger.now(),
            grace=fault.grace if fault.action == "terminate" else None,
            resume={"stop": fault.resume, "delay": fault.seconds}.get(fault.action),
        )

    def _signal_all(self, fault: Fault, ranks: list[int]) -> None:
        """Signal every rank, this one last."""
        own, number = self._position.rank, _SIGNALS[fault.action]
        others = [rank for rank in ranks if rank != own]
        if number == signal.SIGKILL:
            # Frozen first, so that none sees another die and leaves in its own way.
            for rank in others:
                self._send(signal.SIGSTOP, rank, fault)
        for rank in others + [own] * (own in ranks):
            self._send(number, rank, fault)

    def _send(self, number: signal.Signals, rank: int, fault: Fault) -> None:
        if rank == self._position.rank:
            os.kill(os.getpid(), number)
            return
        try:
            pid = int(pid_file(self._position.pids, rank).read_text())
            os.kill(pid, number)
        except (FileNotFoundError, ProcessLookupError):
            # The peer has not started or is already gone: the judge compares strikes with how
            # each process ended and reports a strike that changed nothing.
            self._trace.record("missed", fault=str(fault), rank=rank, signal=number.name)
