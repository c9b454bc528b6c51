"""Seeing every call of this rank to a process group, from the moment of `observe` on.

Guarantees: groups that torch makes afterwards are `ObservedGroup`s, sub-groups and those of meshes
too; groups that exist already, and those of backends that bring a group class of their own, are
left alone. Calls are announced through `seatrial.recovery.probe` as ``collective/NAME`` while
``announces`` is set: ``before`` the call is made, ``after`` it was handed to the backend, which is
while it is under way.

Does not: wait for anything, or change what a call does; an ``interceptor``, if there is one, may.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import Work
from torch.distributed import distributed_c10d

from ..errors import RecoveryError
from ..probe import probe
from .calls import Call
from .group import ObservedGroup
from .log import CallLog
from .meter import Meter

Interceptor = Callable[[Call], Work]

PREFIX = "collective/"


class Observer:
    """What is known of this process's groups. Made by `observe`."""

    def __init__(self, log: CallLog | None) -> None:
        self.log = log
        self.meter: Meter | None = None  # is told of waits for calls that are logged
        # A group that is destroyed takes its connections with it, unless somebody holds it.
        self._groups: list[weakref.ref[ObservedGroup]] = []
        self.attends = False
        self._interceptor: Interceptor | None = None
        self._announces = False
        self._indices = {"group": itertools.count(), "call": itertools.count()}
        self._make_group = distributed_c10d._new_process_group_helper

    @property
    def groups(self) -> list[ObservedGroup]:
        """The groups that this rank is in, oldest first."""
        found = (reference() for reference in list(self._groups))
        return [group for group in found if group is not None]

    @property
    def announces(self) -> bool:
        """Whether every call is announced through the probe, at some tens of microseconds each."""
        return self._announces

    @announces.setter
    def announces(self, wanted: bool) -> None:
        self._announces = wanted
        self.attends = wanted or self._interceptor is not None

    @property
    def interceptor(self) -> Interceptor | None:
        """Called in place of a call, which it may `Call.issue`, and has to return a handle."""
        return self._interceptor

    @interceptor.setter
    def interceptor(self, interceptor: Interceptor | None) -> None:
        self._interceptor = interceptor
        self.attends = self._announces or interceptor is not None

    def attend(self, call: Call) -> Work:
        """Make a call with all that goes with it."""
        event = PREFIX + call.operation.name
        facts: dict[str, object] = {"group": call.group.label}
        if self._announces:
            probe(event, "before", **facts)
        work = call.issue() if self._interceptor is None else self._interceptor(call)
        if self._announces:
            probe(event, "after", **facts)
        return work

    def next_index(self, kind: str) -> int:
        return next(self._indices[kind])

    def log_name(self, kind: str, index: int, **facts: object) -> None:
        if self.log is not None:
            self.log.name(kind, index, **facts)

    def stop(self) -> None:
        """Make ordinary groups again; groups that are observed stay so."""
        global _current
        if _current is self:
            distributed_c10d._new_process_group_helper = self._make_group
            _current = None

    def _start(self) -> None:
        distributed_c10d._new_process_group_helper = self._make_observed_group

    def _make_observed_group(
        self,
        group_size: int,
        group_rank: int,
        global_ranks_in_group: list[int],
        *rest: Any,
        **more: Any,
    ) -> Any:
        backend = str(rest[0] if rest else more.get("backend"))
        if any(name in backend for name in distributed_c10d.Backend._plugins):
            return self._make_group(group_size, group_rank, global_ranks_in_group, *rest, **more)
        # Torch makes the group by this name, and only there; it asks for the class elsewhere.
        ordinary = distributed_c10d.ProcessGroup
        distributed_c10d.ProcessGroup = ObservedGroup  # type: ignore[misc]
        try:
            made = self._make_group(group_size, group_rank, global_ranks_in_group, *rest, **more)
        finally:
            distributed_c10d.ProcessGroup = ordinary  # type: ignore[misc]
        if isinstance(made[0], ObservedGroup):
            # An empty list stands for all ranks.
            made[0].belongs_to(global_ranks_in_group or range(group_size))
            self._groups.append(weakref.ref(made[0], self._groups.remove))
        return made


_current: Observer | None = None


def observe(log: CallLog | None = None) -> Observer:
    """See the calls of every group that is made from now on, and write them to ``log``.

    Call it before ``init_process_group``. There is one observer in a process.

    Raises:
        RecoveryError: there is one already.
    """
    global _current
    if _current is not None:
        raise RecoveryError("collectives are observed already; stop that observer first")
    _current = Observer(log)
    ObservedGroup.observer = _current
    _current._start()
    return _current
