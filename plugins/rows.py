"""A trial's numbers: user properties of its test, and a row of the summary.

User properties are how numbers reach ``--junitxml`` and, under xdist, the controlling process. A
test may run several trials; each starts with a ``chaos_trial`` property.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median

from seatrial.chaos.session import Trial
from seatrial.chaos.uncompared import uncompared
from seatrial.chaos.unseen import notes_of

from .preflight import PlannedTrial

Property = tuple[str, object]

_FIRST = "chaos_trial"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One trial. ``fault`` is its whole schedule; ``note`` is what the launcher has to say.

    ``slowest_rank`` and ``skew_s``, in the median of the steps, are of its `Timing`, and so are the
    ``stragglers`` that were named.
    """

    trial: str
    fault: str
    verdict: str
    passed: bool
    attempts: int
    steps_lost: int
    recovery_s: float | None
    total_s: float
    note: str = ""
    slowest_rank: int | None = None
    skew_s: float | None = None
    stragglers: str = ""


def row_of(planned: PlannedTrial, trial: Trial, *, passed: bool) -> Row:
    """The numbers of a finished trial."""
    judgement, timing = trial.judgement, trial.timing
    return Row(
        trial=planned.name,
        fault=planned.name if planned.omit else str(planned.schedule),
        verdict=str(trial.verdict) + (" (ok)" if planned.omit and passed else ""),
        passed=passed,
        attempts=judgement.attempts,
        steps_lost=judgement.steps_lost,
        recovery_s=None if judgement.recovery_s is None else round(judgement.recovery_s, 3),
        total_s=round(trial.run.total_s, 3),
        # A resharded restore says which random streams had no counterpart.
        note="; ".join(judgement.notes if planned.reshard else _notes(trial)),
        slowest_rank=timing.slowest_rank,
        skew_s=round(median(timing.skews), 6) if timing.skews else None,
        stragglers="; ".join(map(str, timing.stragglers)),
    )


def _notes(trial: Trial) -> list[str]:
    own = [trial.run.note] if trial.run.note else []
    return [*own, *notes_of(trial.run, trial.schedule), *uncompared(trial.run)]


def as_properties(row: Row) -> list[Property]:
    """The row as user properties, all named ``chaos_…``."""
    values = {name: value for name, value in vars(row).items() if name != "trial"}
    return [(_FIRST, row.trial), *((f"chaos_{name}", value) for name, value in values.items())]


def rows_in(properties: Iterable[Property]) -> Iterator[Row]:
    """The rows among a test's user properties, in the order of its trials."""
    values: dict[str, object] = {}
    for name, value in properties:
        if name == _FIRST and values:
            yield Row(**values)  # type: ignore[arg-type]
            values = {}
        if name == _FIRST or (values and name.startswith("chaos_")):
            values[name.removeprefix("chaos_")] = value
    if values:
        yield Row(**values)  # type: ignore[arg-type]
