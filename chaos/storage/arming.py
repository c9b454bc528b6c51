"""Arming a process: from then on its storage operations go through the faults of a schedule.

Guarantees: a rank is armed only if its schedule waits for an operation of the storage, so that
other trials pay nothing; a process that the rank starts anew finds the faults in its environment
and is armed when it makes a ``chaos::`` file system, with counts of its own and the rank's trace; a
forked one goes on counting from where the rank was. Where the store is on a disk that sees its
operations itself, it is the disk that is told of the faults, and no operation counts twice.

Torch-free. Called by the rank's worker, by the file system, and by tests of storage code.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from seatrial.recovery.probe import interpose, listen, performer

from ..inject import Injector, Position
from ..ledger import Ledger
from ..observed.audit import look_for_files
from ..observed.control import Link, root_of
from ..schedule import Schedule
from ..trace import Record, TraceWriter, read_trace
from .operations import Operations

__all__ = ["ENVIRONMENT", "arm", "arm_from_environment", "striking"]

ENVIRONMENT = "SEATRIAL_STORAGE_FAULTS"
"""How processes that a rank starts anew learn of its faults."""


def arm(
    injector: Injector, position: Position, *, strikes: Path, trace: Path
) -> Callable[[], None]:
    """Arm this rank, if its schedule waits for operations; returns what ends it in good order.

    ``strikes`` and ``trace`` are the directory and the file that the injector writes to.
    """
    if not any(fault.at.is_storage for fault in injector.faults):
        return lambda: None
    root = root_of(position.store)
    plan = {
        "schedule": str(Schedule(injector.faults, injector.seed)),
        "position": {**asdict(position), "pids": str(position.pids)},
        "strikes": str(strikes),
        "trace": str(trace),
        "root": root,
    }
    os.environ[ENVIRONMENT] = json.dumps(plan)
    if root is None:
        return _armed(injector)
    link = Link(position.store, root)
    if link.join(json.dumps(plan)):
        look_for_files(injector.trace, ignored=(str(strikes.parent),), holds=link.holds)
    leave, end = listen(link), _armed(injector, link)

    def part() -> None:
        leave()
        end()
        link.end()

    return part


def _armed(injector: Injector, link: Link | None = None) -> Callable[[], None]:
    operations = Operations(injector, on_disk=None if link is None else link.holds)
    stop = interpose(operations)

    def end() -> None:
        stop()
        operations.close()

    return end


def arm_from_environment() -> None:
    """Arm this process as the rank that started it, unless it is armed."""
    text = os.environ.get(ENVIRONMENT)
    if text is None or performer() is not None:
        return
    plan = json.loads(text)
    position = Position(**plan["position"] | {"pids": Path(plan["position"]["pids"])})
    injector = Injector(
        Schedule.parse(plan["schedule"]),
        position,
        Ledger(Path(plan["strikes"])),
        TraceWriter(Path(plan["trace"])),
    )
    _armed(injector, Link(position.store, plan["root"]) if plan.get("root") else None)


class Struck:
    """What `striking` recorded."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace
        self._records: list[Record] | None = None

    @property
    def records(self) -> list[Record]:
        """Every record of the trace so far."""
        return self._records if self._records is not None else read_trace(self._trace)

    @property
    def changes(self) -> list[str]:
        """What the faults made of operations, such as ``storage/write: 3 of 9 bytes written``."""
        return [
            f"{record['event']!s}: {record['change']}"
            for record in self.records
            if record["kind"] == "operation"
        ]

    def keep(self) -> None:
        """Remember the records, because the trace is about to be deleted."""
        self._records = self.records


@contextmanager
def striking(
    schedule: str, *, rank: int = 0, world_size: int = 1, attempt: int = 1
) -> Iterator[Struck]:
    """Arm this process as one rank, for the body.

    Faults at events that code announces strike as well. What is held back by ``late`` is carried
    out at the end.
    """
    with tempfile.TemporaryDirectory(prefix="seatrial-strikes-") as directory:
        trace = Path(directory) / "trace.jsonl"
        writer = TraceWriter(trace)
        position = Position(
            rank=rank,
            world_size=world_size,
            ranks_per_node=world_size,
            attempt=attempt,
            store="",
            pids=Path(directory),
        )
        injector = Injector(Schedule.parse(schedule), position, Ledger(Path(directory)), writer)
        stop, end = listen(injector), _armed(injector)
        struck = Struck(trace)
        try:
            yield struck
        finally:
            end()
            stop()
            writer.close()
            struck.keep()
