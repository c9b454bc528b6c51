"""On real ranks: where their time went adds up, and a straggler of a known delay is found.

Nothing is asserted of how many seconds anything took, but that times measured in two ways agree.
The bundled job waits for its gradients in DDP's reducer, unseen; the tiny one in calls of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from small_trials import experiment_of

from seatrial.chaos.schedule import Schedule
from seatrial.chaos.session import Session, Trial
from seatrial.chaos.timing import StepTimes, read_timing
from seatrial.chaos.timing.stragglers import Straggler
from seatrial.chaos.timing.times import read_times
from seatrial.chaos.verdict import Verdict
from seatrial.plugins.options import ChaosOptions, experiment

DELAY_S = 0.5
"""Much, because what a busy machine may do by itself is held against no rank."""

TINY = experiment_of("tiny_job:TinyJob", {"bug": ""})
GPT = experiment(ChaosOptions(steps=8, checkpoint_interval=4, device="cpu"))
# One warm parent serves both.
PRELOAD = (*GPT.workload.preload, *TINY.workload.preload)
JOBS = {
    name: replace(each, workload=replace(each.workload, preload=PRELOAD))
    for name, each in {"tiny": TINY, "gpt": GPT}.items()
}


def delayed(session: Session, job: str, fault: str) -> Trial:
    trial = session.trial(JOBS[job], Schedule.parse(fault))
    assert trial.verdict is Verdict.RECOVERED, trial.reason
    return trial


def longest(trial: Trial, rank: int) -> list[float]:
    """What each delay of a rank took at most: from the strike to the record after it."""
    strikes = {strike.fault: strike.t for strike in trial.run.strikes()}
    return [
        float(str(record["t"])) - strikes[int(str(record["fault"]))]
        for record in trial.run.trace(1, rank)
        if record["kind"] == "delayed"
    ]


def only(trial: Trial) -> Straggler:
    (late,) = trial.timing.stragglers
    return late


@pytest.mark.parametrize(
    ("job", "rank", "at", "span"),
    [
        ("tiny", 0, "step:5/data", "data"),
        ("tiny", 1, "step:5/collective/all_reduce", "backward"),
        ("gpt", 1, "step:6/backward", "backward"),
        ("gpt", 0, "step:6/backward when=after", "backward"),
    ],
)
def test_the_straggler_and_its_delay_are_found_within_the_error_that_is_told(
    session: Session, job: str, rank: int, at: str, span: str
) -> None:
    trial = delayed(session, job, f"delay rank={rank} at={at} seconds={DELAY_S}")
    late, (longest_s,) = only(trial), longest(trial, rank)
    assert (late.rank, late.steps, late.span, late.asleep) == (
        rank,
        (int(at[5]),),
        span,
        True,
    )
    assert DELAY_S - late.error <= late.seconds <= longest_s + late.error


def test_a_rank_that_was_stopped_is_found_as_well(session: Session) -> None:
    trial = delayed(session, "tiny", f"stop rank=1 at=step:5/forward resume={DELAY_S}")
    late = only(trial)
    assert (late.rank, late.steps, late.span) == (1, (5,), "forward")


def test_a_rank_that_is_late_in_every_step_is_found(session: Session) -> None:
    faults = (f"delay rank=1 at=step:{step}/forward seconds=0.2" for step in range(1, 9))
    trial = delayed(session, "tiny", "; ".join(faults))
    lasting = [late for late in trial.timing.stragglers if len(late.steps) > 1]
    assert [late.rank for late in lasting] == [1]
    assert {late.rank for late in trial.timing.stragglers} == {1}


@pytest.mark.parametrize("job", JOBS)
def test_in_a_clean_run_nobody_is_a_straggler(session: Session, job: str) -> None:
    timing = session.trial(JOBS[job], Schedule()).timing
    assert timing.stragglers == ()
    assert timing.ranks == (0, 1)
    assert len(timing.steps) == 2 * JOBS[job].steps


@pytest.mark.parametrize("job", JOBS)
def test_the_times_of_a_step_add_up_to_its_time_in_the_trace(session: Session, job: str) -> None:
    run = session.reference(JOBS[job]).run
    for each in read_times(run):
        within_s, around_s = step_bounds(run.trace(1, each.rank), each.step)
        assert within_s - 1e-3 <= each.total <= around_s + 1e-3
        assert each.total == pytest.approx(parts(each), abs=1e-5)


def step_bounds(trace: list[dict[str, Any]], step: int) -> tuple[float, float]:
    """Seconds from the announcement of a step's beginning to that of its end, and from the record
    before the one to the record after the other."""
    edges = [
        index
        for index, record in enumerate(trace)
        if record["kind"] == "event" and (record["event"], record["step"]) == ("step", step)
    ]
    first, last = edges
    before, begin, end, after = (trace[i]["t"] for i in (first - 1, first, last, last + 1))
    return end - begin, after - before


def parts(each: StepTimes) -> float:
    phases = each.data + each.forward + each.backward + each.optimizer
    return phases + each.other + each.idle + each.exposed + each.starved


def test_ranks_of_the_bundled_job_overlap_calls_with_their_backward(session: Session) -> None:
    timing = read_timing(session.reference(JOBS["gpt"]).run)
    for rank in (0, 1):
        assert all(value > 0 for value in timing.of(rank, "overlapped"))
        assert len(timing.of(rank, "checkpoint")) == 2
        assert timing.percentile(rank, "backward", 50)
