"""Which rank the others waited for: stragglers, told from their victims and from noise.

In synchronous training one slow rank makes the steps of all longer. The straggler is the one whose
*own* time grew, which leaves out waiting for other ranks and for a processor; its victims are those
who waited so much longer. A rank is named only if both show, and only beyond what ranks do by
themselves:

- in one step: compared with the median of its own other steps in the attempt, less what the other
  ranks' own time grew by in that step, it took longer by more than a quarter of a step, 6 times
  the scatter of all ranks' steps, and twice what the reference had by itself;
- in most steps alike: compared with the reference in the same way, by more than a whole step.

The time that a rank was asleep, neither computing nor waiting for a call or a processor, and that
in which it computed, are looked at apart. The first is next to nothing in a healthy step. On a busy
machine, where a thread may sleep until another of its process gets a processor, as much of it is
left out as those went without.

Does not name: a rank that lacks a processor, or is late in a save; the first step of an attempt,
but where the reference has one to compare; ranks that are slow in turn, each by less than that.
Nobody where the kernel keeps no count of waiting for a processor. Torch-free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median

from .times import OUTSIDE, PHASES, StepTimes

LATE_S_MIN = 0.02
"""Less than that is no straggler, however quiet the machine."""
ERROR_S_MIN = 0.002
"""What times are not known better than: timers, and the calls that read the clocks."""

_OF_A_STEP, _OF_SCATTER, _OF_REFERENCE = 0.25, 6.0, 2.0
_SHARE_WAITED = 0.5
_STEPS_MIN = 4  # of fewer a median says little
_TO_SIGMA = 1.4826  # of a median absolute deviation
_SIGMAS = 3.0

Measure = Callable[[StepTimes], float]
_MEASURES: tuple[Measure, ...] = (attrgetter("slept"), attrgetter("busy"))
_WAITED: Measure = attrgetter("waited")
_TOTAL: Measure = attrgetter("total")


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that others waited for.

    ``steps`` is the step, or most steps of the attempt. ``seconds`` is how much longer than usual
    the rank took by itself, in the median of the steps, give or take ``error``; ``waited`` how much
    longer the others waited. ``span`` is the phase it was in, or ``outside``. ``asleep``: it did
    not compute there, it slept, was stopped, or waited for something that is no collective.
    """

    attempt: int
    rank: int
    steps: tuple[int, ...]
    seconds: float
    error: float
    waited: float
    span: str
    asleep: bool

    def __str__(self) -> str:
        first, last = self.steps[0], self.steps[-1]
        when = f"step {first}" if first == last else f"steps {first} to {last}"
        where = "outside of its phases" if self.span == OUTSIDE else f"in {self.span}"
        return (
            f"rank {self.rank} was {self.seconds:.3f} s late (± {self.error:.3f} s) in {when} of "
            f"attempt {self.attempt}, {'asleep' if self.asleep else 'busy'} {where}; the others "
            f"waited {self.waited:.3f} s longer"
        )


def stragglers(times: Sequence[StepTimes], reference: Sequence[StepTimes]) -> list[Straggler]:
    """Everyone who was late, by attempt and step.

    ``reference`` are the times of an uninterrupted run; attempts with another number of ranks are
    compared with themselves alone.
    """
    if not all(each.knows_starved for each in times):
        return []  # on a busy machine any rank may look like one
    by_attempt: dict[int, list[StepTimes]] = defaultdict(list)
    for each in times:
        by_attempt[each.attempt].append(each)
    clean = _Steps(reference)
    found = [late for own in by_attempt.values() for late in _in_attempt(_Steps(own), clean)]
    return sorted(found, key=lambda each: (each.attempt, each.steps, each.rank))


class _Steps:
    """The steps that all ranks completed, and what is usual in them."""

    def __init__(self, times: Sequence[StepTimes]) -> None:
        self.ranks = sorted({each.rank for each in times})
        by_step: dict[int, dict[int, StepTimes]] = defaultdict(dict)
        for each in times:
            by_step[each.step][each.rank] = each
        whole = [step for step in by_step.values() if len(step) == len(self.ranks)]
        self.first = [step for step in whole if any(each.index == 0 for each in step.values())]
        self.later = [step for step in whole if step not in self.first]
        self.knows_usual = len(self.later) >= _STEPS_MIN
        self._usual: dict[tuple[Measure, int], float] = {}

    def usual(self, measure: Measure, rank: int) -> float:
        key = measure, rank
        if key not in self._usual:
            self._usual[key] = median(measure(step[rank]) for step in self.later)
        return self._usual[key]

    def scatter(self, measure: Measure, ranks: Sequence[int]) -> float:
        """How far single steps are from their rank's usual one; a standard deviation."""
        apart = []
        for rank in ranks:
            usual = self.usual(measure, rank)
            apart += [abs(measure(step[rank]) - usual) for step in self.later]
        return _TO_SIGMA * median(apart)


@dataclass(frozen=True)
class _Lateness:
    """Of one rank in one step: by itself, beyond the others, and what those waited longer."""

    seconds: float
    beyond: float
    waited: float
    excuse: float

    def exceeds(self, threshold: float) -> bool:
        is_late = self.beyond - self.excuse > threshold
        return is_late and self.waited > _SHARE_WAITED * self.seconds


def _lateness(
    measure: Measure, step: dict[int, StepTimes], usual: dict[int, StepTimes] | _Steps, rank: int
) -> _Lateness:
    def longer(measured: Measure, of: int) -> float:
        if isinstance(usual, _Steps):
            return measured(step[of]) - usual.usual(measured, of)
        return measured(step[of]) - measured(usual[of])

    others = [each for each in step if each != rank]
    own = longer(measure, rank)
    # All ranks take longer on a busy machine.
    common = max(0.0, median(longer(measure, each) for each in others))
    waited = median(longer(_WAITED, each) for each in others)
    excuse = step[rank].excuse if measure is _MEASURES[0] else 0.0
    return _Lateness(seconds=own, beyond=own - common, waited=waited, excuse=excuse)


def _in_attempt(own: _Steps, clean: _Steps) -> Iterator[Straggler]:
    if len(own.ranks) < 2:
        return
    clean_known = clean.knows_usual and clean.ranks == own.ranks
    usual = own if own.knows_usual else clean if clean_known else None
    if usual is None:
        return
    for rank in own.ranks:
        if own.knows_usual and clean_known:
            yield from _in_most(own, clean, rank)
        for step in own.later:
            yield from _in_step(step, usual, usual, clean if clean_known else None, rank)
        for step in own.first if clean_known and clean.first else ():
            yield from _in_step(step, clean.first[0], usual, clean, rank)


def _in_step(
    step: dict[int, StepTimes],
    compared: dict[int, StepTimes] | _Steps,
    usual: _Steps,
    clean: _Steps | None,
    rank: int,
) -> Iterator[Straggler]:
    for measure in _MEASURES:
        late = _lateness(measure, step, compared, rank)
        if late.seconds <= LATE_S_MIN:
            continue
        threshold = _threshold(measure, usual, clean)
        if not isinstance(compared, _Steps):  # the first step: there is but one to compare it with
            threshold = max(threshold, max(each.total for each in compared.values()))
        if late.exceeds(threshold):
            yield _straggler(measure, late, [step], compared, usual, rank)
            return


def _without_starving(step: StepTimes) -> float:
    return step.total - step.starved


def _threshold(measure: Measure, usual: _Steps, clean: _Steps | None) -> float:
    total = max(usual.usual(_without_starving, rank) for rank in usual.ranks)
    found = [LATE_S_MIN, _OF_A_STEP * total, _OF_SCATTER * usual.scatter(measure, usual.ranks)]
    if clean is not None:
        by_itself = (
            _lateness(measure, step, clean, rank) for step in clean.later for rank in clean.ranks
        )
        found.append(_OF_REFERENCE * max(each.beyond - each.excuse for each in by_itself))
    return max(found)


def _in_most(own: _Steps, clean: _Steps, rank: int) -> Iterator[Straggler]:
    """Late in most steps of the attempt, so that its own median does not tell."""
    total = max(clean.usual(_TOTAL, each) for each in clean.ranks)
    for measure in _MEASURES:
        late = [_lateness(measure, step, clean, rank) for step in own.later]
        exceeding = [each.exceeds(max(LATE_S_MIN, total)) for each in late]
        if 2 * sum(exceeding) > len(late):
            steps = [step for step, exceeds in zip(own.later, exceeding, strict=True) if exceeds]
            typical = sorted(late, key=lambda each: each.seconds)[len(late) // 2]
            yield _straggler(measure, typical, steps, clean, clean, rank)
            return


def _straggler(
    measure: Measure,
    late: _Lateness,
    steps: Sequence[dict[int, StepTimes]],
    compared: dict[int, StepTimes] | _Steps,
    usual: _Steps,
    rank: int,
) -> Straggler:
    def longer(span: str) -> float:
        def in_span(each: StepTimes) -> float:
            return each.in_span(span)

        before = (
            compared.usual(in_span, rank)
            if isinstance(compared, _Steps)
            else in_span(compared[rank])
        )
        return median(in_span(step[rank]) for step in steps) - before

    return Straggler(
        attempt=steps[0][rank].attempt,
        rank=rank,
        steps=tuple(step[rank].step for step in steps),
        seconds=late.seconds,
        error=max(ERROR_S_MIN, _SIGMAS * usual.scatter(measure, [rank]), late.excuse),
        waited=late.waited,
        span=max((*PHASES, OUTSIDE), key=longer),
        asleep=measure is _MEASURES[0],
    )
