"""The ranks that are on the disk: for each its faults, its counts, and its trace.

Guarantees: what the disk sees of a rank goes to a trace of its own beside the rank's, because a
trace has one writer; each record says that it is the disk's. A rank that was killed by a fault does
nothing more, nor do its children. One whose operation waits, for a delay or because it is stopped,
lets go as soon as it is killed.

Several threads may ask. Torch-free; for `seatrial.chaos.observed.filesystem`.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..actions import INSIDE
from ..fault import Fault
from ..inject import Injector, Position
from ..ledger import Ledger
from ..powerloss.volatile import Survives
from ..schedule import Schedule
from ..storage.alteration import Alteration
from ..storage.operations import Operations
from ..trace import TraceWriter, disk_trace
from .callers import Callers, is_dying, is_stopped
from .handles import Retries

_SLICE_S = 0.01

Cut = Callable[[Survives], None]


class DiskTrace(TraceWriter):
    """What the disk saw of one rank. When it is closed nothing more is recorded."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._closing = threading.Lock()
        self._is_closed = False

    def record(self, kind: str, /, **fields: object) -> None:
        with self._closing:  # the number of a closed file may be another file's by now
            if not self._is_closed:
                super().record(kind, via="disk", **fields)

    def close(self) -> None:
        with self._closing:
            self._is_closed = True
            super().close()


class DiskInjector(Injector):
    """Strikes at a rank from outside of it."""

    def __init__(
        self,
        schedule: Schedule,
        position: Position,
        ledger: Ledger,
        trace: TraceWriter,
        *,
        pid: int,
        cut: Cut,
    ) -> None:
        super().__init__(schedule, position, ledger, trace)
        self.pid = pid
        self.is_killed = False
        self.is_stopped = False
        self._cut = cut

    def signal_own(self, number: signal.Signals) -> None:
        self.is_killed = self.is_killed or number is signal.SIGKILL
        self.is_stopped = self.is_stopped or number is signal.SIGSTOP
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            self.is_killed = True

    def cut_power(self, fault: Fault) -> None:
        self._cut(fault.survives)

    def at_step(self, step: int) -> None:
        """The rank is in ``step`` from now on."""
        self._last_step = step


class DiskOperations(Operations):
    """The operations of one rank, as the disk sees them.

    ``done_with(member, operation)`` is told of each that a fault met; ``step_of(file)`` is the step
    in which the content of a file was written.
    """

    def __init__(self, injector: DiskInjector) -> None:
        super().__init__(injector)
        self._rank = injector
        self._caller = threading.local()
        self.told: Callable[[Alteration], None] = lambda _: None
        self.step_of: Callable[[str, str], int | None] = super().step_of_content

    def begin(self, event: str, data: Any, facts: dict[str, object]) -> Alteration | None:
        self._require_life()
        operation = super().begin(event, data, facts)
        if self._rank.is_stopped:
            while is_stopped(self._rank.pid):
                self._sleep(_SLICE_S)
            self._rank.is_stopped = False
        self._require_life()
        return operation

    def of(self, thread: int) -> DiskOperations:
        """Whose operation comes next in this thread of the disk."""
        self._caller.thread = thread
        return self

    def takes(self, fault: Fault, file: str) -> bool:
        return fault.action not in INSIDE

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._sleep(min(left, _SLICE_S))

    def later(self, operation: Alteration, do: Callable[[Any], Any]) -> Callable[[], object]:
        held: Callable[[Any], Callable[[], object]] | None = operation.facts.get("late")  # type: ignore[assignment]
        return held(operation.content) if held else super().later(operation, do)

    def done(self, operation: Alteration) -> None:
        self.told(operation)

    def step_of_content(self, event: str, file: str) -> int | None:
        return self.step_of(event, file)

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        if is_dying(self._caller.thread):
            raise OSError(errno.EINTR, os.strerror(errno.EINTR))

    def _require_life(self) -> None:
        if self._rank.is_killed:
            raise OSError(errno.EINTR, os.strerror(errno.EINTR))


class Member:
    """One rank in one attempt.

    Attributes:
        is_content: what it writes in a save are checkpoints of the job's own.
        is_saving: it is in a save.
        retries: what was refused to it.
    """

    def __init__(self, plan: str, pid: int, *, store: str, cut: Cut) -> None:
        values = json.loads(plan)
        position = {**values["position"], "pids": Path(values["position"]["pids"]), "store": store}
        self.trace = DiskTrace(disk_trace(Path(values["trace"])))
        self.injector = DiskInjector(
            Schedule.parse(values["schedule"]),
            Position(**position),
            Ledger(Path(values["strikes"])),
            self.trace,
            pid=pid,
            cut=cut,
        )
        self.operations = DiskOperations(self.injector)
        self.run_directory = str(Path(values["trace"]).parent.parent)
        self.is_content = False
        self.is_saving = False
        self.retries = Retries()
        self.pid = pid
        self.rank = self.injector.rank
        self.root = values["root"]
        self._met: set[tuple[int, str]] = set()

    @property
    def saved_step(self) -> int | None:
        """The step of the checkpoint that it is writing; None outside of a save."""
        return self.injector.last_step if self.is_saving else None

    def meet(self, fault: int, file: str, step: int | None) -> None:
        """The rank has come upon what a fault had made of a file."""
        if (fault, file) not in self._met:
            self._met.add((fault, file))
            self.trace.record("met", fault=fault, file=file, step=step)


class Crew:
    """Who is on the disk."""

    def __init__(self) -> None:
        self._members: dict[int, Member] = {}
        self._callers = Callers()

    def __bool__(self) -> bool:
        return bool(self._members)

    def __iter__(self) -> Any:
        return iter(list(self._members.values()))

    def join(self, plan: str, thread: int, *, store: str, cut: Cut) -> Member:
        """A rank is there, with its faults."""
        rank = int(json.loads(plan)["position"]["rank"])
        member = Member(plan, self._callers.join(thread, rank), store=store, cut=cut)
        self._members[rank] = member
        return member

    def of(self, thread: int) -> Member | None:
        """Whose thread it is; None if it belongs to no rank."""
        rank = self._callers.rank_of(thread)
        return None if rank is None else self._members.get(rank)

    def of_process(self, process: int) -> Member | None:
        """Whose process it is or was."""
        rank = self._callers.joined(process)
        return self.of(process) if rank is None else self._members.get(rank)

    def at(self, rank: int) -> Member | None:
        return self._members.get(rank)

    def part(self) -> None:
        """All their processes are gone. What was held back is lost."""
        for member in self._members.values():
            member.trace.close()
        self._members.clear()
        self._callers.forget()
