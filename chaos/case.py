"""The evidence on which a run is judged, and what a check may find in it.

Torch-free values; `seatrial.chaos.checks` looks at them, `seatrial.chaos.verdict` decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from .route import Route
from .run import Run
from .schedule import Schedule
from .trace import Record
from .trajectory import Trajectory


class Verdict(StrEnum):
    """How a trial ended; see DESIGN's words in ``docs/verdicts.md``."""

    RECOVERED = "RECOVERED"
    STOPPED = "STOPPED"
    DIVERGED = "DIVERGED"
    LOST_WORK = "LOST_WORK"
    TORN = "TORN"
    CORRUPTION_UNDETECTED = "CORRUPTION_UNDETECTED"
    HUNG = "HUNG"
    UNRECOVERABLE = "UNRECOVERABLE"
    LEAKED = "LEAKED"
    NOT_EXERCISED = "NOT_EXERCISED"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Why a run did not recover."""

    verdict: Verdict
    reason: str
    component: str = ""
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Leg:
    """What an attempt is compared with: an uninterrupted run on its topology.

    ``since`` is the step at which the state came to this topology, handed over beside the
    checkpoint; None where it came from no other.
    """

    oracle: Trajectory
    since: int | None = None


@dataclass(frozen=True, kw_only=True)
class Resharded:
    """That attempts ran on the topologies of ``route``; ``legs`` by attempt.

    An attempt without a leg has nothing that it could be compared with.
    """

    route: Route
    legs: Mapping[int, Leg]


@dataclass(frozen=True, kw_only=True)
class Case:
    """The evidence: a run, what was meant to happen to it, and the reference."""

    reference: Trajectory
    run: Run
    trajectory: Trajectory
    schedule: Schedule
    checkpoint_interval: int
    expected_steps: range
    resharded: Resharded | None = None

    def leg_of(self, attempt: int | None) -> Leg | None:
        """What an attempt is compared with; None if nothing is known that it must equal."""
        if self.resharded is None:
            return Leg(oracle=self.reference)
        return None if attempt is None else self.resharded.legs.get(attempt)

    def is_damaged(self, step: int, attempt: int) -> bool:
        """Whether the schedule damaged this step's checkpoint, and nobody saved it again since.

        ``attempt`` is the one after which the question is asked. What was read wrongly is not
        damaged where it is stored.
        """
        damaged = [
            number
            for number, _, trace in self.run.traces()
            for record in trace
            if record["kind"] == "damage"
            and record["step"] == step
            and number <= attempt
            and record.get("event") != "storage/read"
        ]
        if not damaged:
            return False
        later = range(max(damaged) + 1, attempt + 1)
        return not any(step in self.trajectory.published.get(each, ()) for each in later)

    def damaged_in(self, attempt: int) -> set[int]:
        """Steps that the schedule damaged in this attempt, before it had restored anything."""
        return {
            int(str(record["step"]))
            for rank in range(self.run.ranks_of(attempt))
            for record in _until_it_began(self.run.trace(attempt, rank))
            if record["kind"] == "damage"
        }

    @property
    def damaged_steps(self) -> set[int]:
        """Steps whose checkpoint the schedule damaged."""
        return {
            int(str(record["step"]))
            for _, _, trace in self.run.traces()
            for record in trace
            if record["kind"] == "damage"
        }

    def steps_lost(self) -> list[int]:
        """For each attempt but the last, how many completed steps the next one had to repeat."""
        lost = []
        for before, after in pairwise(self.run.attempts):
            beginning = self.trajectory.beginning(after.number)
            resumed = (beginning.restored or 0) if beginning else before.store.newest_valid or 0
            lost.append(max(0, self.trajectory.reached[before.number] - resumed))
        return lost


def _until_it_began(trace: list[Record]) -> Iterator[Record]:
    for record in trace:
        if record["kind"] == "began":
            return
        yield record
