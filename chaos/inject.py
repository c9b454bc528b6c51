"""Listens to a rank's events, writes each to the trace, and strikes where the schedule says.

Guarantees: an event is in the trace before any fault strikes at it; a strike is in the ledger
before it happens; counting is exact and per rank, and starts anew in every attempt. Signals aimed
at several ranks are sent by the first of them that reaches the event, itself last, as when a whole
node is lost; so is what the switch between hosts is asked for. Runs inside the rank, in the
thread that announces the event; threads share counts, and each has a step of its own, so that a
save in the background and the training do not mix theirs.

Operations of the storage come by `Injector.due`: those that no fault waits for are not traced, and
faults that alter one are handed back to whoever carries it out (`seatrial.chaos.storage`).
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from .actions import ALWAYS, BENDING, DAMAGE, NETWORK
from .damage import damage_newest
from .errors import InjectedError, LaunchError
from .events import COLLECTIVE
from .exhaust import exhaust_memory
from .fault import Fault
from .ledger import Ledger, Strike
from .network.control import ask
from .powerloss.control import cut_from_rank
from .schedule import Schedule
from .trace import TraceWriter

_SIGNALS = {
    "kill": signal.SIGKILL,
    "powercut": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "terminate": signal.SIGTERM,
}


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where the injector runs: its rank, the attempt, and how to reach its peers and the store."""

    rank: int
    world_size: int
    ranks_per_node: int
    attempt: int
    store: str
    pids: Path


@dataclass(frozen=True)
class _Moment:
    """One edge of one event, and what was announced with it."""

    event: str
    edge: str
    step: int | None
    facts: Mapping[str, object] = field(default_factory=dict)


def pid_file(directory: Path, rank: int) -> Path:
    """Where a rank of this attempt leaves its process id."""
    return directory / f"rank{rank}.pid"


class Injector:
    """The listener of one rank in one attempt; see `seatrial.recovery.probe.listen`."""

    def __init__(
        self,
        schedule: Schedule,
        position: Position,
        ledger: Ledger,
        trace: TraceWriter,
        *,
        bend: Callable[[int, Fault], None] | None = None,
    ) -> None:
        """``bend`` is told of a fault, by its index, that the next collective is for."""
        self._bend = bend
        self._schedule = schedule
        self._position = position
        self._ledger = ledger
        self._trace = trace
        self._process = os.getpid()
        self._thread = threading.local()
        self._counting = threading.Lock()
        self._counts = [0] * len(schedule.faults)
        self._claimed: set[int] = set()  # by this process, in this attempt
        self._last_step: int | None = None
        self._training_step: int | None = None
        self._targets = [
            fault.targets(world_size=position.world_size, ranks_per_node=position.ranks_per_node)
            for fault in schedule.faults
        ]

    def __call__(self, event: str, edge: str, facts: dict[str, object]) -> None:
        step = facts.get("step")
        if isinstance(step, int):
            self._thread.step = self._last_step = step
            if event == "step":
                self._training_step = step
        known = {name: value for name, value in facts.items() if name != "data"}
        # Collectives may be made by threads of autograd, which have begun no step.
        here = self._step
        if here is None and event.startswith(COLLECTIVE):
            here = self._training_step
        self._trace.record("event", event=event, edge=edge, **{"step": here, **known})
        self._strike_all(_Moment(event, edge, here, facts))

    @property
    def trace(self) -> TraceWriter:
        return self._trace

    @property
    def seed(self) -> int:
        return self._schedule.seed

    @property
    def faults(self) -> tuple[Fault, ...]:
        return self._schedule.faults

    @property
    def rank(self) -> int:
        return self._position.rank

    def waiting(self, event: str) -> list[Fault]:
        """The faults of this rank and attempt that wait for the operation ``event``."""
        return [
            fault
            for index, fault in enumerate(self._schedule.faults)
            if fault.at.is_storage
            and self._position.rank in self._targets[index]
            and fault.attempt in (None, self._position.attempt)
            and any(event == each.name for each in fault.at.events())
        ]

    def due(
        self, event: str, edge: str, file: str, step: int | None, among: Collection[Fault]
    ) -> list[tuple[int, Fault]]:
        """Announce one edge of an operation on ``file``; the faults that alter it, which struck.

        ``step`` is that of the checkpoint which the file belongs to, if it is known. Of the faults
        ``among`` which to look, others strike here and now.
        """
        if step is None:
            step = self._step if self._step is not None else self._last_step
        self._trace.record("event", event=event, edge=edge, step=step, file=file)
        return self._strike_all(_Moment(event, edge, step, {"file": file}), among)

    @property
    def last_step(self) -> int | None:
        """The step that any thread of the rank was in last."""
        return self._last_step

    @property
    def _step(self) -> int | None:
        """That of this thread."""
        step: int | None = getattr(self._thread, "step", None)
        return step

    def _strike_all(
        self, moment: _Moment, among: Collection[Fault] | None = None
    ) -> list[tuple[int, Fault]]:
        # All count before one strikes: the strike may raise.
        with self._counting:
            due = [
                (index, fault)
                for index, fault in enumerate(self._schedule.faults)
                if (among is None or fault in among) and self._is_due(index, fault, moment)
            ]
        altering = []
        for index, fault in due:
            if not fault.alters_storage:
                self._strike(index, fault, moment)
            elif self._claims(index, fault, moment):
                altering.append((index, fault))
        return altering

    def _is_due(self, index: int, fault: Fault, moment: _Moment) -> bool:
        facts = moment.facts
        if fault.when != moment.edge or self._position.rank not in self._targets[index]:
            return False
        if fault.attempt not in (None, self._position.attempt):
            return False
        if not fault.at.matches(moment.event, moment.step):
            return False
        if "file" in facts and not fnmatchcase(str(facts["file"]), fault.path):
            return False
        if fault.record not in (None, facts.get("record")):
            return False
        group = facts.get("group")
        if None not in (group, fault.group) and not fnmatchcase(str(group), str(fault.group)):
            return False
        self._counts[index] += 1
        beyond = self._counts[index] - fault.nth
        # A record that is damaged for good is so whenever it is read.
        always = fault.times == ALWAYS or fault.is_in_the_data
        return beyond >= 0 and (always or beyond < fault.times)

    def _claims(self, index: int, fault: Fault, moment: _Moment) -> bool:
        """Whether the fault may alter an operation: not if it struck in an earlier attempt."""
        with self._counting:
            if index not in self._claimed:
                strike = self._describe(index, fault, self._position.rank, moment)
                if not self._ledger.claim(strike, persistent=fault.persistent):
                    return False
                self._claimed.add(index)
        return True

    def _strike(self, index: int, fault: Fault, moment: _Moment) -> None:
        own = self._position.rank
        together = fault.action in (*_SIGNALS, *NETWORK)
        claimed: list[int] = []
        for rank in self._targets[index] if together else (own,):
            strike = self._describe(index, fault, rank, moment)
            if not self._ledger.claim(strike, persistent=fault.persistent):
                # Whoever claims the first target strikes them all: two that share the targets
                # could kill each other before either is done.
                break
            claimed.append(rank)
        if not claimed and not fault.is_in_the_data:
            return
        self._trace.record("strike", fault=str(fault), ranks=claimed)
        if fault.action in NETWORK:
            self._ask_switch(index, fault, claimed)
        elif together:
            self._signal_all(fault, claimed)
        elif fault.action in DAMAGE:
            what = damage_newest(self._position.store, fault, own, seed=self._schedule.seed + index)
            self._trace.record(
                "damage", fault=index, step=what.step, file=what.file, change=what.change
            )
        elif fault.action in BENDING and self._bend is not None:
            self._bend(index, fault)
        elif fault.action == "spoil":
            self._spoil(index, moment.facts)
        elif fault.action == "delay":
            seconds = self.delay_s(index, fault)
            time.sleep(seconds)
            self._trace.record("delayed", fault=index, seconds=seconds)
        elif fault.action == "raise":
            raise InjectedError(f"injected by the fault '{fault}'")
        elif fault.action == "exit":
            os._exit(fault.code)
        elif fault.action == "oom":
            exhaust_memory()

    def _spoil(self, index: int, facts: Mapping[str, object]) -> None:
        data, record = facts.get("data"), facts.get("record")
        if isinstance(data, bytearray) and data:
            choice = random.Random(f"{self._schedule.seed + index}/{record}")
            data[choice.randrange(len(data))] ^= 1 << choice.randrange(8)
            # A data-loader worker has begun no step, whatever the rank was in that forked it.
            step = self._step if os.getpid() == self._process else None
            self._trace.record("spoilt", fault=index, record=record, step=step)

    def delay_s(self, index: int, fault: Fault) -> float:
        """How long a ``delay`` lasts, in seconds."""
        if fault.tail is None:
            return fault.seconds
        chance = random.Random(f"{self._schedule.seed + index}/{self._position.rank}")
        return fault.seconds * chance.paretovariate(fault.tail)

    def _describe(self, index: int, fault: Fault, rank: int, moment: _Moment) -> Strike:
        lasts_s = {
            "stop": fault.resume,
            "partition": fault.heal,
            "delay": self.delay_s(index, fault),
        }
        return Strike(
            fault=index,
            action=fault.action,
            rank=rank,
            attempt=self._position.attempt,
            event=moment.event,
            edge=moment.edge,
            step=moment.step,
            t=Ledger.now(),
            grace=fault.grace if fault.action == "terminate" else None,
            # Of several operations in a row it is not known when they are over.
            resume=lasts_s.get(fault.action) if fault.times == 1 else None,
        )

    def _ask_switch(self, index: int, fault: Fault, ranks: list[int]) -> None:
        """Have the switch between hosts strike; what it did is in its own trace."""
        request = {"do": fault.action, "fault": index, "host": fault.node}
        try:
            ask(self._position.pids, **request, way=fault.way, heal=fault.heal, rate=fault.rate)
        except (OSError, LaunchError) as error:
            for rank in ranks:
                self._trace.record("missed", fault=str(fault), rank=rank, why=str(error))

    def _signal_all(self, fault: Fault, ranks: list[int]) -> None:
        """Signal every rank, this one last."""
        own, number = self._position.rank, _SIGNALS[fault.action]
        others = [rank for rank in ranks if rank != own]
        if number == signal.SIGKILL:
            # Frozen first, so that none sees another die and leaves in its own way.
            for rank in others:
                self._send(signal.SIGSTOP, rank, fault)
        if fault.action == "powercut":
            self.cut_power(fault)
        for rank in others + [own] * (own in ranks):
            self._send(number, rank, fault)

    def signal_own(self, number: signal.Signals) -> None:
        """Signal the rank that this is the injector of, also from a process that it forked."""
        os.kill(self._process, number)

    def cut_power(self, fault: Fault) -> None:
        """Take the power of the disk that the store is on."""
        cut_from_rank(self._position.store, fault.survives)

    def _send(self, number: signal.Signals, rank: int, fault: Fault) -> None:
        if rank == self._position.rank:
            self.signal_own(number)
            return
        try:
            pid = int(pid_file(self._position.pids, rank).read_text())
            os.kill(pid, number)
        except (FileNotFoundError, ProcessLookupError):
            # The peer has not started or is already gone: the judge compares strikes with how
            # each process ended and reports a strike that changed nothing.
            self._trace.record("missed", fault=str(fault), rank=rank, signal=number.name)
