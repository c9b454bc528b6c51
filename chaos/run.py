"""What happened in one run: its attempts, its strikes and its traces, as values on disk.

A run's directory can be read at any time after the run by any process (the reference is shared
that way). Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from .launch.plan import network_file, trace_file
from .ledger import Ledger, Strike
from .trace import Record, disk_trace, read_trace

Ending = Literal["completed", "failed", "hung"]


PREEMPTED = 75
"""Exit status of a rank that saved and left because it was told to (``EX_TEMPFAIL``)."""


@dataclass(frozen=True, kw_only=True)
class StoreState:
    """The checkpoint store between attempts, when no process is left to change it.

    ``valid`` and ``damaged`` are published steps; ``writers`` says which attempt published each;
    ``leftovers`` are files that no manifest names; ``lost`` is what a power loss in the attempt
    took of the disk, None if there was none. ``own``: the checkpoints are written by the job's own
    code, so ``valid`` are those that it acknowledged and no fault damaged.
    """

    valid: tuple[int, ...] = ()
    damaged: dict[int, str] = field(default_factory=dict)
    quarantined: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    lost: tuple[str, ...] | None = None
    own: bool = False

    @property
    def newest_valid(self) -> int | None:
        return max(self.valid, default=None)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One launch of the world. Times are ``CLOCK_MONOTONIC`` seconds; ``exits`` are by rank, and
    ``heard`` says when it was known of each, which is some milliseconds later at least.

    ``ranks`` is None where they are as many as the run's.
    A rank that the launcher ended has no exit. ``calls`` says of each rank of an attempt that did
    not complete which collective it made last, ``stacks`` where each rank of one that hung was.
    """

    number: int
    ending: Ending
    launched_t: float
    ended_t: float
    exits: dict[int, int]
    culprit: int | None = None
    cause: str = ""
    output: str = ""
    strays: tuple[str, ...] = ()
    litter: tuple[str, ...] = ()
    store: StoreState = field(default_factory=StoreState)
    ranks: int | None = None
    calls: tuple[str, ...] = ()
    stacks: tuple[str, ...] = ()
    heard: dict[int, float] = field(default_factory=dict)


def all_left(exits: Mapping[int, int], ranks: int) -> bool:
    """Whether every rank of an attempt left by itself, having done its work or when told to.

    Only such ranks can have cleaned up; one that was ended, as in a hang, has no exit.
    """
    return len(exits) == ranks and set(exits.values()) <= {0, PREEMPTED}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A whole run. ``ranks`` are those of its first attempt; ``total_s`` is wall time; ``note`` is
    the launcher's."""

    directory: Path
    ranks: int
    attempts: tuple[Attempt, ...]
    total_s: float
    note: str = ""

    @property
    def completed(self) -> bool:
        return self.attempts[-1].ending == "completed"

    @property
    def stores_itself(self) -> bool:
        """Whether the job writes its checkpoints by its own code."""
        return any(attempt.store.own for attempt in self.attempts)

    def strikes(self) -> list[Strike]:
        """Every fault that struck, oldest first."""
        return Ledger(self.directory / "strikes").strikes()

    def ranks_of(self, attempt: int) -> int:
        """How many ranks an attempt had."""
        found = (each.ranks for each in self.attempts if each.number == attempt)
        return next(found, None) or self.ranks

    def trace(self, attempt: int, rank: int) -> list[Record]:
        """What one rank did in one attempt, and what its disk saw of it, in order."""
        path = trace_file(self.directory, attempt, rank)
        own, seen = read_trace(path), read_trace(disk_trace(path))
        return sorted([*own, *seen], key=lambda record: float(str(record["t"]))) if seen else own

    def network(self, attempt: int) -> list[Record]:
        """What the switch between the hosts saw in one attempt; nothing if there were no hosts."""
        return read_trace(network_file(self.directory, attempt))

    def error_of(self, attempt: Attempt, rank: int | None = None) -> Record | None:
        """The exception that ended ``rank``, or else the attempt's culprit, as its trace has it.

        ``bases`` names its class and all base classes, ``causes`` the classes of what it was raised
        from, and ``said`` their messages.
        """
        trace = self.trace(attempt.number, attempt.culprit or 0 if rank is None else rank)
        return next((record for record in trace if record["kind"] == "error"), None)

    def traces(self) -> Iterator[tuple[int, int, list[Record]]]:
        """``(attempt, rank, records)`` of every rank that was launched."""
        for attempt in self.attempts:
            for rank in range(self.ranks_of(attempt.number)):
                yield attempt.number, rank, self.trace(attempt.number, rank)

    def save(self) -> None:
        """Write ``run.json`` so that another process can `load_run` it."""
        values = asdict(self) | {"directory": str(self.directory)}
        partial = self.directory / "run.json.partial"
        partial.write_text(json.dumps(values))
        partial.rename(self.directory / "run.json")


def load_run(directory: Path) -> Run:
    """Read a run that `Run.save` wrote."""
    values = json.loads((directory / "run.json").read_text())
    attempts = tuple(_load_attempt(each) for each in values.pop("attempts"))
    return Run(**values | {"directory": directory, "attempts": attempts})


def _load_attempt(values: dict[str, object]) -> Attempt:
    store = values.pop("store")
    assert isinstance(store, dict)
    state = StoreState(
        valid=tuple(store["valid"]),
        damaged={int(step): why for step, why in store["damaged"].items()},
        quarantined=tuple(store["quarantined"]),
        leftovers=tuple(store["leftovers"]),
        lost=None if store.get("lost") is None else tuple(store["lost"]),
        own=store.get("own", False),
    )
    for name in ("exits", "heard"):
        by_rank = values[name]
        assert isinstance(by_rank, dict)
        values[name] = {int(rank): value for rank, value in by_rank.items()}
    for name in ("strays", "litter", "calls", "stacks"):
        values[name] = tuple(values[name])  # type: ignore[arg-type]
    return Attempt(**values, store=state)  # type: ignore[arg-type]
