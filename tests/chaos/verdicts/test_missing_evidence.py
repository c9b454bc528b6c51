"""Evidence that is missing never passes, and each sample is used once."""

from __future__ import annotations

from typing import Any

import pytest
from evidence import ALL, KILL, KILLED, Evidence, finish, interrupt

from seatrial.chaos.samples import sample_faults
from seatrial.chaos.trajectory import read_trajectory
from seatrial.chaos.verdict import Verdict

from .conftest import MakeEvidence


def test_a_missing_step_is_unrecoverable(reference: Evidence, killed: Evidence) -> None:
    finish(killed, steps=[6])
    judgement = killed.judged(reference, KILL)
    assert judgement.verdict is Verdict.UNRECOVERABLE
    assert "[1, 2, 3, 4, 6]" in judgement.reason


def test_a_run_that_ends_early_is_unrecoverable(reference: Evidence, killed: Evidence) -> None:
    finish(killed, steps=[5], published=(), valid=(2, 4))
    assert killed.judged(reference, KILL).verdict is Verdict.UNRECOVERABLE


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_a_trace_never_passes(
    reference: Evidence, killed: Evidence, rank: int
) -> None:
    finish(killed, silent=[rank])
    assert killed.judged(reference, KILL).verdict is Verdict.UNRECOVERABLE


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_a_trace_after_the_last_step_never_passes(
    reference: Evidence, run: Evidence, rank: int
) -> None:
    text = "kill rank=1 at=exit"
    run.strike(text)
    run.attempt(ALL, ending="failed", exits=KILLED, published=(2, 4, 6), valid=(4, 6))
    finish(run, restored=6, steps=(), published=(), silent=[rank])
    assert run.judged(reference, text).verdict is Verdict.UNRECOVERABLE


def test_a_run_without_any_trace_never_passes(reference: Evidence, run: Evidence) -> None:
    run.attempt((), silent=[0, 1])
    assert run.judged(reference, "clean").verdict is Verdict.UNRECOVERABLE
    assert run.judged(reference, "clean", steps=range(0)).verdict is Verdict.UNRECOVERABLE


def test_a_run_without_steps_never_passes_even_where_none_are_expected(
    reference: Evidence, run: Evidence
) -> None:
    run.attempt(())
    assert run.judged(reference, "clean", steps=range(0)).verdict is not Verdict.RECOVERED


def test_a_step_that_the_reference_lacks_never_passes(
    make_evidence: MakeEvidence, killed: Evidence
) -> None:
    short = make_evidence("reference")
    short.attempt(range(1, 6), published=(2, 4), valid=(4,))
    finish(killed)
    judgement = killed.judged(short, KILL)
    assert judgement.verdict is Verdict.DIVERGED
    assert "the reference has no such step" in judgement.reason


def test_a_sample_used_twice_in_the_surviving_lineage_is_diverged(
    make_evidence: MakeEvidence,
) -> None:
    twice = {(1, 2): {"samples": [0, [0]]}}
    reference, run = make_evidence("reference"), make_evidence("run")
    for each in (reference, run):
        each.attempt(ALL, published=(2, 4, 6), valid=(4, 6), changed=twice)
    judgement = run.judged(reference, "clean")
    assert (judgement.verdict, judgement.component) == (Verdict.DIVERGED, "sampler")
    assert "epoch 0: sample 0 is consumed 2 times" in judgement.reason


def test_a_sample_missing_from_a_finished_epoch_is_diverged(make_evidence: MakeEvidence) -> None:
    fewer: dict[tuple[int, int], dict[str, Any]] = {(1, 2): {"samples": [0, []]}}
    reference, run = make_evidence("reference"), make_evidence("run")
    for each in (reference, run):
        each.attempt(ALL, published=(2, 4, 6), valid=(4, 6), changed=fewer)
    judgement = run.judged(reference, "clean")
    assert (judgement.verdict, judgement.component) == (Verdict.DIVERGED, "sampler")
    assert "only 3 of 4 samples" in judgement.reason


def test_a_run_that_reports_no_samples_never_passes(make_evidence: MakeEvidence) -> None:
    none: dict[tuple[int, int], dict[str, Any]] = {
        (rank, step): {"samples": [0, []]} for rank in (0, 1) for step in ALL
    }
    reference, run = make_evidence("reference"), make_evidence("run")
    for each in (reference, run):
        each.attempt(ALL, published=(2, 4, 6), valid=(4, 6), changed=none)
    judgement = run.judged(reference, "clean")
    assert judgement.verdict is Verdict.DIVERGED
    assert "no rank reported the samples" in judgement.reason


def test_samples_that_a_failed_attempt_lost_may_be_used_again(
    reference: Evidence, run: Evidence
) -> None:
    run.strike(KILL)
    interrupt(run, steps=range(1, 6))
    finish(run)
    assert run.judged(reference, KILL).verdict is Verdict.RECOVERED


def test_a_kill_of_all_ranks_that_ended_only_one_is_not_exercised(
    reference: Evidence, run: Evidence
) -> None:
    for rank in range(2):
        run.strike("kill rank=*", rank=rank)
    interrupt(run, cause="killed")
    finish(run)
    judgement = run.judged(reference, "kill rank=* at=step:5/data")
    assert judgement.verdict is Verdict.NOT_EXERCISED
    assert "rank 0" in judgement.reason


def test_a_control_that_begins_in_an_epoch_is_not_blamed_for_its_first_half(
    reference: Evidence, run: Evidence
) -> None:
    run.attempt(range(2, 4), restored=1, source=1, valid=(1,))
    faults = list(sample_faults(read_trajectory(run.run)))
    assert faults == []
