"""A run's traces as a trajectory: where each attempt began, and the state after every step.

Guarantees: a step counts only if every rank recorded it; fingerprints of the ranks are added up to
those of the logical state, so that runs compare bitwise whatever their topology. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from seatrial.recovery.compare import Combined, Holders, combine, holders

from .run import Run
from .trace import Record

RankOutputs = Mapping[str, Any]

UNSAVED = "unsaved"
"""Among a rank's outputs of a step: objects of the job outside its state, with fingerprints."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step that every rank completed. ``outputs`` are by rank. ``t`` is when the last did."""

    number: int
    attempt: int
    state: Combined
    holders: Holders
    outputs: tuple[RankOutputs, ...]
    t: float


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """Where an attempt began: ``restored`` is the checkpoint's step, None on a fresh start.

    ``source`` is the attempt that saved the checkpoint; ``damaged`` are the newer generations that
    were rejected, with reasons; ``hazards`` are of `seatrial.chaos.diagnosis`.
    """

    attempt: int
    restored: int | None
    source: int | None
    damaged: tuple[tuple[int, str], ...]
    notes: tuple[str, ...]
    state: Combined
    holders: Holders
    samples_per_epoch: int | None
    t: float
    hazards: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """All attempts of a run in order. ``reached`` is the last step that any rank completed."""

    beginnings: tuple[Beginning, ...]
    steps: tuple[Step, ...]
    reached: Mapping[int, int]
    published: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def beginning(self, attempt: int) -> Beginning | None:
        """Where an attempt began, or None if some rank never got that far."""
        return next((each for each in self.beginnings if each.attempt == attempt), None)

    def of_attempt(self, attempt: int) -> list[Step]:
        return [step for step in self.steps if step.attempt == attempt]

    def lineage(self) -> list[Step]:
        """The steps that the final state came from, in order, each from the attempt that counts."""
        kept: list[Step] = []
        attempt: int | None = max((each.attempt for each in self.beginnings), default=None)
        upto: int | None = None
        while attempt is not None:
            beginning = self.beginning(attempt)
            steps = [
                step for step in self.of_attempt(attempt) if upto is None or step.number <= upto
            ]
            kept = steps + kept
            if beginning is None or beginning.restored is None or beginning.source is None:
                break
            if beginning.source >= attempt:
                break  # saved before this run began
            attempt, upto = beginning.source, beginning.restored
        return kept


def read_trajectory(run: Run) -> Trajectory:
    """Put the traces of all ranks together."""
    beginnings, steps = [], []
    reached: dict[int, int] = {}
    published: dict[int, frozenset[int]] = {}
    for attempt in run.attempts:
        earlier = (published, reached)  # so far
        traces = [run.trace(attempt.number, rank) for rank in range(run.ranks_of(attempt.number))]
        by_step = [_by_step(trace) for trace in traces]
        starts = [next(_of_kind(trace, "began"), None) for trace in traces]
        if all(starts):
            first = [each for each in starts if each]
            beginnings.append(_beginning(attempt.number, first, *earlier))
        common = set.intersection(*(set(each) for each in by_step))
        for number in sorted(common):
            steps.append(_step(number, attempt.number, [each[number] for each in by_step]))
        reached[attempt.number] = max((max(each, default=0) for each in by_step), default=0)
        published[attempt.number] = frozenset(
            record["step"] for trace in traces for record in _of_kind(trace, "published")
        )
    return Trajectory(
        beginnings=tuple(beginnings), steps=tuple(steps), reached=reached, published=published
    )


def _of_kind(trace: list[Record], kind: str) -> Any:
    return (record for record in trace if record["kind"] == kind)


def _by_step(trace: list[Record]) -> dict[int, Any]:
    return {record["step"]: record for record in _of_kind(trace, "step")}


def _beginning(
    attempt: int,
    records: list[Any],
    published: Mapping[int, frozenset[int]],
    reached: Mapping[int, int],
) -> Beginning:
    first = records[0]
    restored, source = first["restored"], first["source"]
    if restored is not None and source is None:
        # The job's own checkpoints do not say; the last attempt that saved the step, or did it.
        saved = [number for number, steps in published.items() if restored in steps]
        did = [number for number, upto in reached.items() if upto >= restored]
        source = max(saved or did, default=None)
    return Beginning(
        attempt=attempt,
        restored=restored,
        source=source,
        damaged=tuple((step, reason) for step, reason in first["damaged"]),
        notes=tuple(note for record in records for note in record["notes"]),
        state=combine([record["fingerprint"] for record in records], world_size=len(records)),
        holders=holders([record["fingerprint"] for record in records]),
        samples_per_epoch=first["samples_per_epoch"],
        t=max(record["t"] for record in records),
        hazards=tuple(first.get("hazards", ())),
    )


def _step(number: int, attempt: int, records: list[Any]) -> Step:
    return Step(
        number=number,
        attempt=attempt,
        state=combine([record["fingerprint"] for record in records], world_size=len(records)),
        holders=holders([record["fingerprint"] for record in records]),
        outputs=tuple(record["outputs"] for record in records),
        t=max(record["t"] for record in records),
    )
