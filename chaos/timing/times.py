"""What one rank did with the time of one step, as its trace tells it.

A step's time is that of its phases, of what is outside of them, and of waiting for collectives and
for a processor, which belong to no phase; these add up to the step. The time in which calls were
under way while the rank went on (``overlapped``) runs beside, and so do the check after the step
and the save. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

from ..run import Run
from ..trace import Record

RECORD = "step-times"
PHASES = ("data", "forward", "backward", "optimizer")
OUTSIDE, CHECK = "outside", "check"
SPANS = (*PHASES, OUTSIDE, CHECK)
"""What a rank's thread may be in: a phase, the rest of the step, or the loop's check of it."""
SAVE = "checkpoint"
"""What it may be in besides, and belongs to no step, though the job saves in the midst of one."""

_S = 1e-6


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of one rank in one step; ``index`` counts the steps of the attempt, from 0.

    ``data`` to ``optimizer`` are the rank's own time in the phase; ``other`` is what it computed
    outside of them, ``idle`` what it slept there. ``exposed`` is time in waits for collectives,
    ``starved`` time without a processor though it could have run. ``overlapped``: it went on while
    calls were under way. ``check`` is what the loop does after the step: it compares calls, in
    which the rank waited ``check_waited``, and records the state. ``asleep`` are the seconds of
    each span in which the rank neither computed nor waited for a call or a processor. Of these
    in a step, up to ``excuse`` may have been waiting for another thread of the process that had no
    processor, or for the disk of the trace. Unless ``knows_starved``, the kernel keeps no count of
    waiting for a processor, and it is in there.
    """

    attempt: int
    rank: int
    step: int
    index: int
    data: float
    forward: float
    backward: float
    optimizer: float
    other: float
    idle: float
    exposed: float
    overlapped: float
    starved: float
    check: float
    check_waited: float
    asleep: Mapping[str, float]
    excuse: float = 0.0
    checkpoint: float | None = None
    knows_starved: bool = True

    @property
    def own(self) -> float:
        """What the step took the rank itself: all but waiting for calls and for a processor."""
        return sum(self.in_span(name) for name in (*PHASES, OUTSIDE))

    @property
    def total(self) -> float:
        """The whole step, without the check and the save."""
        return self.own + self.exposed + self.starved

    @property
    def waited(self) -> float:
        """For other ranks, in the step or in the check after it."""
        return self.exposed + self.check_waited

    @property
    def slept(self) -> float:
        """Of the rank's own time, what it was not on a processor."""
        return sum(self.asleep[name] for name in (*PHASES, OUTSIDE))

    @property
    def busy(self) -> float:
        """Of the rank's own time, what it was on a processor."""
        return self.own - self.slept

    def in_span(self, name: str) -> float:
        """The rank's own time in a phase, or outside of all."""
        if name == OUTSIDE:
            return self.other + self.idle
        value: float = getattr(self, name)
        return value


def read_times(run: Run) -> list[StepTimes]:
    """What every rank did in every step that it completed, by attempt, rank and time."""
    return [each for number, rank, trace in run.traces() for each in _of_rank(number, rank, trace)]


def _of_rank(attempt: int, rank: int, trace: list[Record]) -> Iterator[StepTimes]:
    saves = _saves(trace)
    records = (record for record in trace if record["kind"] == RECORD)
    for index, record in enumerate(records):
        step = int(str(record["step"]))
        spans = cast(dict[str, list[float]], record["spans"])
        times = _step_times(attempt, rank, step, index, spans, saves.get(step))
        excuse = float(str(record["excuse"])) * _S
        yield replace(times, excuse=excuse, knows_starved="blind" not in record)


def _saves(trace: list[Record]) -> dict[int, float]:
    """Seconds of each whole save, by step."""
    begun: dict[object, float] = {}
    saves: dict[int, float] = {}
    for record in trace:
        if record["kind"] == "event" and record["event"] == "checkpoint":
            step, t = record["step"], float(str(record["t"]))
            if record["edge"] == "before":
                begun[step] = t
            elif step in begun:
                saves[int(str(step))] = t - begun[step]
    return saves


def _step_times(
    attempt: int,
    rank: int,
    step: int,
    index: int,
    spans: Mapping[str, list[float]],
    checkpoint: float | None,
) -> StepTimes:
    known = {name: _Span(*(us * _S for us in spans.get(name, [0.0] * 5))) for name in SPANS}
    inside = [known[name] for name in (*PHASES, OUTSIDE)]
    outside, check = known[OUTSIDE], known[CHECK]
    return StepTimes(
        attempt=attempt,
        rank=rank,
        step=step,
        index=index,
        data=known["data"].own,
        forward=known["forward"].own,
        backward=known["backward"].own,
        optimizer=known["optimizer"].own,
        other=outside.own - outside.asleep,
        idle=outside.asleep,
        exposed=sum(span.waited for span in inside),
        overlapped=sum(span.hidden for span in inside),
        starved=sum(span.starved for span in inside),
        check=check.wall,
        check_waited=check.asleep + check.waited,
        asleep={name: known[name].asleep for name in SPANS},
        checkpoint=checkpoint,
    )


@dataclass(frozen=True)
class _Span:
    """As a rank records it: seconds of the wall, on a processor, ready without one, waiting for
    calls, and going on while calls were under way."""

    wall: float
    cpu: float
    starved: float
    waited: float
    hidden: float

    @property
    def own(self) -> float:
        return max(0.0, self.wall - self.starved - self.waited)

    @property
    def asleep(self) -> float:
        # A wait for a call uses a processor, too, to begin and to end.
        return max(0.0, self.own - self.cpu)
