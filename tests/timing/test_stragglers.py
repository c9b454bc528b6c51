"""Who is named as a straggler, and who is not: on times that are made up.

Verifies the judgement, not the measuring: that is for test_meter, test_stopwatch and test_ranks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from step_times import run

from seatrial.chaos.timing.stragglers import Straggler, stragglers

REFERENCE = run(seed=1)


def only(found: list[Straggler]) -> Straggler:
    (late,) = found
    return late


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("scatter", "factor"), [(0.001, 1.0), (0.01, 1.0), (0.003, 3.0)])
def test_nobody_is_named_in_a_clean_run_however_noisy(
    seed: int, scatter: float, factor: float
) -> None:
    assert stragglers(run(seed=seed, scatter=scatter, factor=factor), REFERENCE) == []


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("asleep", [True, False])
def test_the_rank_the_step_the_place_and_the_delay_are_found(ranks: int, asleep: bool) -> None:
    name = "asleep" if asleep else "backward"
    times = run(lambda rank, step: {name: 0.1} if (rank, step) == (1, 12) else {}, ranks=ranks)
    late = only(stragglers(times, run(ranks=ranks, seed=1)))
    assert (late.rank, late.steps, late.span, late.asleep) == (1, (12,), "backward", asleep)
    assert abs(late.seconds - 0.1) <= late.error < 0.01
    assert late.waited == pytest.approx(0.1, abs=0.01)


def test_a_delay_of_a_busy_machine_is_measured_as_well() -> None:
    times = run(lambda rank, step: {"asleep": 0.1} if (rank, step) == (1, 12) else {}, scatter=0.01)
    late = only(stragglers(times, REFERENCE))
    assert abs(late.seconds - 0.1) <= late.error <= 0.002


def test_two_late_steps_are_two() -> None:
    late = run(lambda rank, step: {"asleep": 0.05 * step} if step in (5, 9) and rank else {})
    found = stragglers(late, REFERENCE)
    assert [(each.rank, each.steps, round(each.seconds, 2)) for each in found] == [
        (1, (5,), 0.25),
        (1, (9,), 0.45),
    ]


@pytest.mark.parametrize("name", ["asleep", "forward"])
def test_a_rank_that_is_late_in_every_step_is_named_once(name: str) -> None:
    times = run(lambda rank, step: {name: 0.05} if rank == 0 else {})
    found = [each for each in stragglers(times, REFERENCE) if len(each.steps) > 1]
    late = only(found)
    assert (late.rank, late.steps) == (0, tuple(range(2, 15)))
    assert abs(late.seconds - 0.05) <= late.error


def test_steps_that_all_ranks_take_longer_for_name_nobody() -> None:
    slow = run(lambda rank, step: {"backward": 0.1} if step == 12 else {})
    assert stragglers(slow, REFERENCE) == []


def test_a_rank_without_a_processor_is_no_straggler() -> None:
    starved = run(lambda rank, step: {"starved": 0.1} if (rank, step) == (1, 12) else {})
    assert stragglers(starved, REFERENCE) == []


def test_nobody_is_a_straggler_for_whom_nobody_waited() -> None:
    late = run(lambda rank, step: {"asleep": 0.1} if (rank, step) == (1, 12) else {})
    alone = [replace(each, exposed=0.003) for each in late]
    assert stragglers(alone, REFERENCE) == []


def test_what_the_reference_does_by_itself_is_not_held_against_a_run() -> None:
    def hiccup(rank: int, step: int) -> dict[str, float]:
        return {"asleep": 0.06} if (rank, step) == (0, 7) else {}

    assert stragglers(run(hiccup, seed=2), run(hiccup, seed=1)) == []
    assert stragglers(run(hiccup, seed=2), REFERENCE) != []


def test_less_than_a_quarter_of_a_step_is_no_straggler() -> None:
    def late(rank: int, step: int) -> dict[str, float]:
        return {"asleep": 0.1 * (rank == 1 and step == 12), "forward": 1.0}

    slow = run(lambda rank, step: {"forward": 1.0}, seed=1)
    assert stragglers(run(late), slow) == []


def test_the_first_step_of_an_attempt_has_to_be_late_by_a_whole_one() -> None:
    def late(seconds: float) -> list[Straggler]:
        times = run(lambda rank, step: {"asleep": seconds} if (rank, step) == (1, 1) else {})
        return stragglers(times, REFERENCE)

    assert late(0.025) == []
    assert only(late(0.2)).steps == (1,)


def test_attempts_are_looked_at_apart() -> None:
    second = run(
        lambda rank, step: {"asleep": 0.1} if (rank, step) == (0, 8) else {},
        attempt=2,
        first=6,
        steps=9,
    )
    late = only(stragglers(run(steps=6) + second, REFERENCE))
    assert (late.attempt, late.rank, late.steps) == (2, 0, (8,))


def test_an_attempt_of_few_steps_is_compared_with_the_reference() -> None:
    times = run(lambda rank, step: {"asleep": 0.1} if (rank, step) == (1, 2) else {}, steps=3)
    assert only(stragglers(times, REFERENCE)).steps == (2,)
    assert stragglers(times, []) == []


def test_an_attempt_on_other_ranks_is_compared_with_itself() -> None:
    def late(rank: int, step: int) -> dict[str, float]:
        return {"asleep": 0.1} if (rank, step) == (3, 9) else {}

    assert only(stragglers(run(late, ranks=4), REFERENCE)).rank == 3
    # Whether it is late all the time cannot be told.
    always = run(lambda rank, step: {"asleep": 0.1} if rank == 3 else {}, ranks=4)
    assert stragglers(always, REFERENCE) == []


def test_a_step_that_a_rank_did_not_complete_is_left_out() -> None:
    times = run(lambda rank, step: {"asleep": 0.1} if (rank, step) == (1, 14) else {})
    cut = [each for each in times if (each.rank, each.step) != (0, 14)]
    assert stragglers(cut, REFERENCE) == []


def test_nobody_is_named_where_waiting_for_a_processor_is_not_counted() -> None:
    late = run(lambda rank, step: {"asleep": 0.1} if (rank, step) == (1, 12) else {})
    blind = [replace(each, knows_starved=False) for each in late]
    assert stragglers(blind, REFERENCE) == []


def test_sleep_that_starved_threads_of_the_rank_explain_is_not_held_against_it() -> None:
    late = run(lambda rank, step: {"asleep": 0.1} if (rank, step) == (1, 12) else {})
    assert stragglers([replace(each, excuse=0.09) for each in late], REFERENCE) == []
    partly = only(stragglers([replace(each, excuse=0.03) for each in late], REFERENCE))
    assert (partly.rank, partly.error) == (1, 0.03)
    # Who computes has no such excuse.
    busy = run(lambda rank, step: {"backward": 0.1} if (rank, step) == (1, 12) else {})
    assert only(stragglers([replace(each, excuse=0.09) for each in busy], REFERENCE)).rank == 1


def test_a_world_of_one_rank_has_no_straggler() -> None:
    alone = run(lambda rank, step: {"asleep": 0.1} if step == 12 else {}, ranks=1)
    assert stragglers(alone, run(ranks=1)) == []


def test_a_straggler_is_a_sentence() -> None:
    times = run(lambda rank, step: {"asleep": 0.1} if (rank, step) == (1, 12) else {})
    said = str(only(stragglers(times, REFERENCE)))
    assert said.startswith("rank 1 was 0.100 s late (± 0.002 s) in step 12 of attempt 1, asleep in")
