"""The times of a whole run: percentiles for each rank, who was slowest, and by how much.

Torch-free. Nothing here is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from ..run import Run
from .stragglers import Straggler, stragglers
from .times import StepTimes, read_times

COLUMNS = (
    *("data", "forward", "backward", "optimizer", "exposed", "overlapped"),
    *("starved", "other", "idle", "check", "checkpoint"),
)
"""What there are percentiles of: the numbers of `StepTimes` by name."""


@dataclass(frozen=True)
class Timing:
    """All steps of a run, by attempt, rank and time; ``stragglers`` are those who were named."""

    steps: tuple[StepTimes, ...] = ()
    stragglers: tuple[Straggler, ...] = ()

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({each.rank for each in self.steps}))

    def of(self, rank: int, name: str) -> list[float]:
        """Seconds of one rank in each step, oldest first; ``name`` is one of `COLUMNS`, ``own`` or
        ``total``. Of ``checkpoint`` there are as many as saves."""
        values = (getattr(each, name) for each in self.steps if each.rank == rank)
        return [value for value in values if value is not None]

    def percentile(self, rank: int, name: str, percent: float) -> float | None:
        """The value that ``percent`` of the steps do not exceed; None if there are none."""
        return _nearest(self.of(rank, name), percent)

    @cached_property
    def skews(self) -> list[float]:
        """For each step that all ranks of an attempt completed: the longest own time of a rank,
        less the shortest. Seconds."""
        by_step: dict[tuple[int, int], list[float]] = {}
        for each in self.steps:
            by_step.setdefault((each.attempt, each.step), []).append(each.own)
        return [max(own) - min(own) for own in by_step.values() if len(own) > 1]

    @cached_property
    def slowest_rank(self) -> int | None:
        """The rank whose own time is the longest in the median; None without steps."""
        return max(self.ranks, key=self._own, default=None)

    def _own(self, rank: int) -> float:
        return self.percentile(rank, "own", 50) or 0.0


def read_timing(run: Run, reference: Sequence[StepTimes] = ()) -> Timing:
    """What the traces of a run tell; ``reference`` are the times of an uninterrupted one."""
    times = tuple(read_times(run))
    return Timing(times, tuple(stragglers(times, reference)))


def timing_lines(timing: Timing, *, ranks_most: int = 4) -> list[str]:
    """A table in milliseconds: median, 90th percentile and most of each rank; then who was slowest.

    Of more than ``ranks_most`` ranks those whose own time is the longest.
    """
    if not timing.steps:
        return ["no rank completed a step"]
    longest = sorted(timing.ranks, key=lambda rank: -(timing.percentile(rank, "own", 50) or 0.0))
    shown = sorted(longest[:ranks_most])
    cells = {
        name: [_cell(lambda percent, r=rank, n=name: timing.percentile(r, n, percent))  # type: ignore[misc]
               for rank in shown]
        for name in (*COLUMNS, "total")
    }  # fmt: skip
    width = max(len(cell) for row in cells.values() for cell in row)
    lines = [" " * 12 + "".join(f"  {f'rank {rank}':>{width}}" for rank in shown)]
    for name, row in cells.items():
        if any(row):
            label = "whole step" if name == "total" else name
            lines.append(f"{label:<12}" + "".join(f"  {cell:>{width}}" for cell in row))
    left_out = len(timing.ranks) - len(shown)
    if left_out:
        lines.append(f"and {left_out} ranks that took less time of their own")
    slowest = timing.slowest_rank
    if len(timing.ranks) > 1 and slowest is not None:
        own_ms = 1000 * (timing.percentile(slowest, "own", 50) or 0.0)
        skew = _cell(lambda percent: _nearest(timing.skews, percent))
        lines.append(f"slowest: rank {slowest}, {own_ms:.1f} of its own; skew of the ranks: {skew}")
        lines += [f"straggler: {each}" for each in timing.stragglers] or [_nobody(timing)]
    return lines


def _nobody(timing: Timing) -> str:
    if all(each.knows_starved for each in timing.steps):
        return "no straggler"
    return "no straggler is looked for: this kernel does not count waiting for a processor"


def _nearest(values: Sequence[float], percent: float) -> float | None:
    ordered = sorted(values)
    return ordered[max(0, ceil(percent / 100 * len(ordered)) - 1)] if ordered else None


def _cell(percentile: Callable[[float], float | None]) -> str:
    """``median / 90 % / most`` in milliseconds; empty if there is nothing, or nothing but 0."""
    values = [percentile(percent) for percent in (50, 90, 100)]
    if any(value is None for value in values) or not any(values):
        return ""
    return " / ".join(f"{1000 * (value or 0.0):.1f}" for value in values)
