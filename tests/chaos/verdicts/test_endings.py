"""Verdicts about how a run ended: HUNG, STOPPED, UNRECOVERABLE, LEAKED."""

from __future__ import annotations

from typing import Any

import pytest
from evidence import FLIP, KILL, KILLED, Evidence, finish, interrupt

from seatrial.chaos.verdict import Verdict


def test_an_attempt_that_hangs_though_nothing_struck_it_is_hung(
    reference: Evidence, killed: Evidence
) -> None:
    finish(killed, ending="hung", exits={}, steps=[5], published=(), valid=(2, 4), cause="silent")
    finish(killed)
    assert killed.judged(reference, KILL).verdict is Verdict.HUNG


def test_a_run_whose_last_attempt_hangs_is_hung(reference: Evidence, run: Evidence) -> None:
    text = "stop rank=1 at=step:5/data"
    run.strike(text)
    interrupt(run, ending="hung", exits={})
    assert run.judged(reference, text).verdict is Verdict.HUNG


def test_an_attempt_that_fails_though_nothing_struck_it_is_unrecoverable(
    reference: Evidence, killed: Evidence
) -> None:
    finish(
        killed,
        ending="failed",
        exits={0: 1, 1: 1},
        steps=[5],
        published=(),
        valid=(2, 4),
        cause="KeyError: 'x'",
    )
    finish(killed)
    judgement = killed.judged(reference, KILL)
    assert judgement.verdict is Verdict.UNRECOVERABLE
    assert "attempt 2 failed though no fault struck in it: KeyError: 'x'" in judgement.reason


def test_a_stop_that_was_continued_does_not_explain_a_failure(
    reference: Evidence, run: Evidence
) -> None:
    text = "stop rank=1 at=step:5/data resume=1"
    run.strike(text)
    interrupt(run, exits={0: 1, 1: 1})
    finish(run)
    assert run.judged(reference, text).verdict is Verdict.UNRECOVERABLE


def test_giving_up_with_a_valid_checkpoint_is_stopped(
    reference: Evidence, killed: Evidence
) -> None:
    judgement = killed.judged(reference, KILL)
    assert judgement.verdict is Verdict.STOPPED
    assert "the checkpoint of step 4 is valid" in judgement.reason


def test_giving_up_before_anything_was_saved_is_stopped_and_says_so(
    reference: Evidence, run: Evidence
) -> None:
    run.strike(KILL)
    run.attempt([1], ending="failed", exits=KILLED, cause="killed")
    judgement = run.judged(reference, KILL)
    assert judgement.verdict is Verdict.STOPPED
    assert "step None" not in judgement.reason
    assert "nothing had been saved" in judgement.reason


def test_giving_up_without_any_valid_checkpoint_is_unrecoverable(
    reference: Evidence, flipping: Evidence
) -> None:
    flipping.attempt(
        range(1, 5),
        ending="failed",
        exits=KILLED,
        published=(4,),
        damaged={4: "digest"},
        damage=(4,),
    )
    flipping.attempt(
        (),
        ending="failed",
        exits={0: 1},
        damaged={4: "digest"},
        silent=(0, 1),
        error="NoValidCheckpointError",
    )
    assert flipping.judged(reference, FLIP).verdict is Verdict.UNRECOVERABLE


@pytest.mark.parametrize("exits", [{}, {0: 0}], ids=["none left", "one was left"])
def test_what_ranks_that_hung_and_were_ended_leave_is_not_held_against_the_job(
    reference: Evidence, run: Evidence, exits: dict[int, int]
) -> None:
    run.strike("stop rank=1 at=step:5/data")
    run.attempt(
        range(1, 5),
        ending="hung",
        exits=exits,
        published=(2, 4),
        valid=(2, 4),
        litter=("/tmp/pymp-worker",),
    )
    finish(run)
    judgement = run.judged(reference, "stop rank=1 at=step:5/data")
    assert judgement.verdict is Verdict.RECOVERED, judgement.reason


@pytest.mark.parametrize(
    "left", [{"strays": ("sleep 3",)}, {"litter": ("/dev/shm/x",)}, {"leftovers": ("step-6/x",)}]
)
def test_anything_left_behind_by_a_finished_run_is_leaked(
    reference: Evidence, killed: Evidence, left: dict[str, Any]
) -> None:
    finish(killed, **left)
    judgement = killed.judged(reference, KILL)
    assert judgement.verdict is Verdict.LEAKED
    ((name,),) = left.values()
    assert name in judgement.reason
