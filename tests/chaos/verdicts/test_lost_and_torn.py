"""Verdicts about checkpoints: LOST_WORK, TORN, CORRUPTION_UNDETECTED."""

from __future__ import annotations

from evidence import ALL, FLIP, KILL, KILLED, Evidence, finish, interrupt

from seatrial.chaos.supervisor import PREEMPTED
from seatrial.chaos.verdict import Verdict


def test_resuming_from_an_older_checkpoint_than_the_newest_valid_is_lost_work(
    reference: Evidence, killed: Evidence
) -> None:
    finish(killed, restored=2, steps=range(3, 7))
    judgement = killed.judged(reference, KILL)
    assert judgement.verdict is Verdict.LOST_WORK
    assert "step 4 was valid" in judgement.reason


def test_starting_afresh_in_spite_of_a_valid_checkpoint_is_lost_work(
    reference: Evidence, killed: Evidence
) -> None:
    finish(killed, restored=None, source=None, steps=ALL)
    judgement = killed.judged(reference, KILL)
    assert judgement.verdict is Verdict.LOST_WORK
    assert judgement.reason == "attempt 2 began anew, though the checkpoint of step 4 was valid"


def test_losing_more_steps_than_the_interval_is_lost_work(
    reference: Evidence, run: Evidence
) -> None:
    run.strike(KILL)
    interrupt(run, steps=range(1, 6), published=(2,), valid=(2,))
    finish(run, restored=2, steps=range(3, 7))
    judgement = run.judged(reference, KILL)
    assert (judgement.verdict, judgement.steps_lost) == (Verdict.LOST_WORK, 3)


def test_a_preempted_job_that_repeats_a_step_is_lost_work(
    reference: Evidence, run: Evidence
) -> None:
    text = "terminate rank=1 at=step:5/data"
    run.strike(text)
    exits = dict.fromkeys((0, 1), PREEMPTED)
    interrupt(run, steps=range(1, 6), exits=exits)
    finish(run)
    assert run.judged(reference, text).verdict is Verdict.LOST_WORK


def test_a_published_checkpoint_that_is_damaged_without_a_fault_is_torn(
    reference: Evidence, run: Evidence
) -> None:
    run.strike(KILL)
    interrupt(run, valid=(2,), damaged={4: "shard cut"})
    finish(run, restored=2, steps=range(3, 7))
    judgement = run.judged(reference, KILL)
    assert (judgement.verdict, judgement.step) == (Verdict.TORN, 4)
    assert "shard cut" in judgement.reason


def test_an_acknowledged_checkpoint_that_vanished_is_torn(
    reference: Evidence, run: Evidence
) -> None:
    run.strike(KILL)
    interrupt(run, valid=(2,))
    finish(run, restored=2, steps=range(3, 7))
    judgement = run.judged(reference, KILL)
    assert judgement.verdict is Verdict.TORN
    assert "acknowledged the checkpoint of step 4" in judgement.reason


def test_an_acknowledged_checkpoint_that_a_later_attempt_lost_is_torn(
    reference: Evidence, run: Evidence
) -> None:
    """It outlived its own attempt, was restored, and was gone before anything else was saved."""
    again = f"{KILL}; kill rank=1 at=step:5/data attempt=2"
    run.strike(KILL)
    interrupt(run)
    run.strike(KILL, fault=1, attempt=2)
    run.attempt((), restored=4, source=1, ending="failed", exits=KILLED, valid=(2,))
    run.attempt(range(3, 7), restored=2, source=1, published=(4, 6), valid=(4, 6))
    judgement = run.judged(reference, again)
    assert judgement.verdict is Verdict.TORN
    assert (
        "attempt 1 acknowledged the checkpoint of step 4, but after attempt 2" in judgement.reason
    )


def test_an_acknowledgement_by_one_rank_counts(reference: Evidence, run: Evidence) -> None:
    run.attempt(ALL, published=(2, 4, 6), valid=(2, 4))
    assert run.judged(reference, "clean").verdict is Verdict.TORN


def test_resuming_from_what_was_never_published_is_torn(reference: Evidence, run: Evidence) -> None:
    run.strike(KILL)
    interrupt(run, published=(2,), valid=(2,))
    finish(run)
    judgement = run.judged(reference, KILL)
    assert judgement.verdict is Verdict.TORN
    assert "never published" in judgement.reason


def test_falling_back_from_a_damaged_checkpoint_is_recovered(
    reference: Evidence, flipped: Evidence
) -> None:
    finish(flipped, restored=2, steps=range(3, 7))
    assert flipped.judged(reference, FLIP).verdict is Verdict.RECOVERED


def test_resuming_from_a_damaged_checkpoint_is_corruption_undetected(
    reference: Evidence, flipped: Evidence
) -> None:
    finish(flipped)
    judgement = flipped.judged(reference, FLIP)
    assert (judgement.verdict, judgement.step) == (Verdict.CORRUPTION_UNDETECTED, 4)
