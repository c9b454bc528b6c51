"""Stands in for the calls of one rank: makes them as they are, or bends the one a fault is for.

Guarantees: a fault is armed by the injector when its event comes, in the rank's own counting, and
bends the next call, which is that event's own call if the event is a collective. What was done, or
why it could not be, is in the trace as ``bent``; whether it mattered is for the judge.
"""

from __future__ import annotations

import random
from fnmatch import fnmatchcase
from functools import partial

from torch._C._distributed_c10d import Work

from seatrial.recovery.collectives.calls import Call
from seatrial.recovery.collectives.observer import Observer

from ..fault import Fault
from ..trace import TraceWriter
from .bends import BENDS, Bend, Unable
from .works import Held


class Bender:
    """An interceptor; see `seatrial.recovery.collectives.observer`."""

    def __init__(self, observer: Observer, trace: TraceWriter, *, seed: int) -> None:
        self._observer = observer
        self._trace = trace
        self._seed = seed
        self._armed: list[tuple[int, Fault]] = []
        self._held: list[tuple[Held, Call, Fault, int]] = []

    def arm(self, index: int, fault: Fault) -> None:
        """Bend the next call that the ``index``-th fault of the schedule is for."""
        self._armed.append((index, fault))

    def __call__(self, call: Call) -> Work:
        found = next((each for each in self._armed if _is_for(each[1], call)), None)
        if found is not None:
            self._armed.remove(found)
            work = self._bent(call, *found)
        else:
            late = self._no_longer_held(call)
            work = call.issue()
            for held in late:
                held.make()
        return work

    def _bent(self, call: Call, index: int, fault: Fault) -> Work:
        if fault.action == "reorder":
            return self._hold(call, index, fault)
        bend = Bend(
            call=call,
            fault=fault,
            chance=random.Random(f"{self._seed}/{index}"),
            groups=self._observer.groups,
            says=partial(self._record, call, index, fault),
        )
        try:
            return BENDS[fault.action](bend)
        except Unable as why:
            self._record(call, index, fault, "", unable=str(why))
            return call.issue()

    def _hold(self, call: Call, index: int, fault: Fault) -> Work:
        def waited() -> None:
            self._held = [each for each in self._held if each[0] is not held]
            why = "it was waited for before another call came"
            self._record(call, index, fault, "", unable=why)

        held = Held(call.issue, waited)
        self._held.append((held, call, fault, index))
        return held

    def _no_longer_held(self, next_one: Call) -> list[Held]:
        """Those to be made after the next one, recorded before: gloo may end the process for it."""
        found = []
        for held, call, fault, index in list(self._held):
            same = next_one.group is call.group and next_one.operation is call.operation
            other = next_one.group is not call.group
            if other if fault.across else same:
                self._held.remove((held, call, fault, index))
                what = f"was made after the next one, {next_one.operation.name} at {next_one.site}"
                self._record(call, index, fault, what)
                found.append(held)
        return found

    def _record(self, call: Call, index: int, fault: Fault, what: str, *, unable: str = "") -> None:
        self._trace.record(
            "bent",
            fault=index,
            call=f"{call.operation.name} of group {call.group.label} at {call.site}",
            what=what,
            unable=unable,
        )


def _is_for(fault: Fault, call: Call) -> bool:
    return fault.group is None or fnmatchcase(call.group.label, fault.group)
