"""What a judge makes of bent collectives: their effect, and what of a run they may excuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from evidence import Evidence, finish, interrupt

from seatrial.chaos.verdict import Judgement, Verdict

SWAP = "reorder rank=1 at=step:5/collective/all_reduce"
CORRUPT = "garble rank=1 at=step:5/collective/all_reduce"
ALL = range(1, 7)


@pytest.fixture
def judged(reference: Evidence, run: Evidence) -> Callable[[str], Judgement]:
    return lambda schedule: run.judged(reference, schedule)


def bend(
    run: Evidence, fault: str, /, *, what: str = "was bent", unable: str = "", **where: Any
) -> None:
    """``where`` is of the strike; of several, each needs a ``t`` of its own."""
    place: dict[str, Any] = {"attempt": 1, "fault": 0, "t": 9.0} | where
    run.strike(fault, **place)
    said = {"call": "all_reduce of dp", "what": what, "unable": unable}
    run.record(1, place["attempt"], "bent", fault=place["fault"], t=place["t"], **said)


def refused(run: Evidence, error: str, **different: Any) -> None:
    """An attempt that ended of it after the checkpoint of step 4, and one that went on from there.

    ``different`` is of the first attempt.
    """
    interrupt(run, exits={0: 1, 1: 1}, **different)
    for rank in (0, 1):
        run.fail(rank=rank, attempt=1, error=error, t=11.0)
    finish(run)


def test_a_mismatch_that_was_found_is_recovered(run: Evidence, judged: Any) -> None:
    bend(run, SWAP)
    refused(run, "CollectiveMismatchError")
    assert judged(SWAP).verdict is Verdict.RECOVERED


def test_wrong_steps_that_nothing_came_of_are_excused(run: Evidence, judged: Any) -> None:
    bend(run, CORRUPT)
    refused(run, "ReplicaMismatchError", steps=range(1, 7), wrong={5: "model"})
    assert judged(CORRUPT).verdict is Verdict.RECOVERED


def test_a_step_that_was_wrong_before_is_not_excused(run: Evidence, judged: Any) -> None:
    bend(run, CORRUPT)
    refused(run, "ReplicaMismatchError", steps=range(1, 7), wrong={4: "model"})
    assert judged(CORRUPT).verdict is not Verdict.RECOVERED


def test_a_step_that_was_over_when_the_call_was_bent_is_not_excused(
    run: Evidence, judged: Any
) -> None:
    late = "garble rank=1 at=step:5/checkpoint"
    refused(run, "ReplicaMismatchError", steps=range(1, 6), wrong={5: "model"})
    bend(run, late, t=9.5)  # the step was recorded at 9
    judgement = judged(late)
    assert judgement.verdict is Verdict.DIVERGED
    assert "attempt 1, step 5: model/x differs" in judgement.reason


def test_steps_that_were_excused_are_not_said_to_be_equal(run: Evidence, judged: Any) -> None:
    bend(run, CORRUPT)
    refused(run, "ReplicaMismatchError", steps=range(1, 7), wrong={5: "model"})
    said = "all 6 steps and 2 beginnings are equal; of 2 more after a bent call nothing is in the"
    assert said in judged(CORRUPT).reason


def test_a_checkpoint_of_a_wrong_state_is_corruption_undetected(run: Evidence, judged: Any) -> None:
    bend(run, CORRUPT)
    run.attempt(ALL, wrong={5: "model"}, published=(2, 4, 6), valid=(4, 6))
    judgement = judged(CORRUPT)
    assert judgement.verdict is Verdict.CORRUPTION_UNDETECTED
    assert "attempt 1 published the checkpoint of step 6" in judgement.reason
    assert "wrong since step 5" in judgement.reason


def test_so_it_is_if_the_run_went_on_from_it(run: Evidence, judged: Any) -> None:
    bend(run, CORRUPT)
    ended: dict[str, Any] = {"ending": "failed", "exits": {0: 1, 1: 1}}
    run.attempt(ALL, wrong={5: "model"}, published=(2, 4, 6), valid=(4, 6), **ended)
    run.attempt([], restored=6, source=1, wrong_at_start="model", valid=(4, 6))
    assert judged(CORRUPT).verdict is Verdict.CORRUPTION_UNDETECTED


def test_a_wrong_loss_in_the_surviving_lineage_is_diverged(run: Evidence, judged: Any) -> None:
    bend(run, CORRUPT)
    run.attempt(ALL, changed={(1, 5): {"loss": "0x1p+3"}}, published=(2, 4, 6), valid=(4, 6))
    assert judged(CORRUPT).verdict is Verdict.DIVERGED


def test_a_bend_that_changed_nothing_is_not_exercised(run: Evidence, judged: Any) -> None:
    bend(run, SWAP, what="was made after the next one")
    run.attempt(ALL, published=(2, 4, 6), valid=(4, 6))
    judgement = judged(SWAP)
    assert judgement.verdict is Verdict.NOT_EXERCISED
    assert "was made after the next one, but all that was computed equals" in judgement.reason


def test_one_that_could_not_be_made_says_why(run: Evidence, judged: Any) -> None:
    bend(run, SWAP, unable="it was waited for before another call came")
    run.attempt(ALL, published=(2, 4, 6), valid=(4, 6))
    judgement = judged(SWAP)
    assert judgement.verdict is Verdict.NOT_EXERCISED
    assert "it was waited for" in judgement.reason


def test_one_that_met_no_call_is_not_exercised(run: Evidence, judged: Any) -> None:
    run.strike(SWAP)
    run.attempt(ALL, published=(2, 4, 6), valid=(4, 6))
    judgement = judged(SWAP)
    assert judgement.verdict is Verdict.NOT_EXERCISED
    assert "rank 1 made no such call after it" in judgement.reason


def test_an_end_that_another_fault_explains_is_not_its_effect(run: Evidence, judged: Any) -> None:
    kill = "kill rank=1 at=step:5/optimizer"
    bend(run, SWAP)
    run.strike(kill, fault=1)
    interrupt(run)
    run.fail(rank=0, attempt=1, error="RuntimeError", t=11.0)
    finish(run)
    judgement = judged(f"{SWAP}; {kill}")
    assert judgement.verdict is Verdict.NOT_EXERCISED
    assert "reorder" in judgement.reason


EARLY = "garble rank=1 at=step:3/backward"
DROP = "drop rank=1 at=step:5/optimizer"
SAVED: dict[str, Any] = {"published": (2, 4), "valid": (2, 4)}


def hung(run: Evidence, steps: range = range(1, 5)) -> None:
    """An attempt that hung after these steps, and one that went on from the checkpoint of 4."""
    interrupt(run, steps=steps, ending="hung", exits={})
    finish(run)


def test_ranks_that_had_done_all_of_it_did_not_hang_of_the_bend(run: Evidence, judged: Any) -> None:
    last = "duplicate rank=1 at=step:6/collective/barrier"
    run.attempt(ALL, ending="hung", published=(2, 4, 6), valid=(4, 6))
    bend(run, last, step=6, t=13.5)  # in the last save, after the last step
    for rank in (0, 1):
        run.record(rank, 1, "ended", status=0)
    run.attempt((), restored=6, source=1, valid=(4, 6))
    assert judged(last).verdict is not Verdict.RECOVERED


def test_a_hang_is_of_the_last_bend_before_it(run: Evidence, judged: Any) -> None:
    bend(run, EARLY, step=3, t=9.0)
    bend(run, DROP, fault=1, t=9.5)
    hung(run)
    judgement = judged(f"{EARLY}; {DROP}")
    assert judgement.verdict is Verdict.NOT_EXERCISED
    assert EARLY in judgement.reason
    assert "the next step equals the reference" in judgement.reason


def test_so_it_is_if_no_step_lies_between_them(run: Evidence, judged: Any) -> None:
    bend(run, CORRUPT, t=9.0)
    bend(run, DROP, fault=1, t=9.5)
    hung(run)
    judgement = judged(f"{CORRUPT}; {DROP}")
    assert judgement.verdict is Verdict.NOT_EXERCISED
    assert CORRUPT in judgement.reason


def test_copies_that_differ_are_of_the_bend_that_changed_them(run: Evidence, judged: Any) -> None:
    bend(run, EARLY, step=3, t=9.0)
    bend(run, CORRUPT, fault=1, t=9.5)
    refused(run, "ReplicaMismatchError", steps=range(1, 7), wrong={5: "model"})
    judgement = judged(f"{EARLY}; {CORRUPT}")
    assert judgement.verdict is Verdict.NOT_EXERCISED
    assert EARLY in judgement.reason


def test_numbers_that_were_wrong_already_show_nothing(run: Evidence, judged: Any) -> None:
    bend(run, CORRUPT, t=9.0)
    bend(run, "garble rank=1 at=step:6/backward", fault=1, step=6, t=9.5)
    refused(run, "ReplicaMismatchError", steps=range(1, 7), wrong={5: "model"})
    judgement = judged(f"{CORRUPT}; garble rank=1 at=step:6/backward")
    assert judgement.verdict is Verdict.NOT_EXERCISED
    assert "an earlier bent call had already made the numbers wrong" in judgement.reason


def test_bends_that_cannot_be_told_apart_changed_the_numbers_both(
    run: Evidence, judged: Any
) -> None:
    bend(run, SWAP, t=9.0)
    bend(run, CORRUPT, fault=1, t=9.5)
    refused(run, "ReplicaMismatchError", steps=range(1, 7), wrong={5: "model"})
    assert judged(f"{SWAP}; {CORRUPT}").verdict is Verdict.RECOVERED


def test_a_bend_that_changed_numbers_may_come_before_one_that_hangs(
    run: Evidence, judged: Any
) -> None:
    bend(run, CORRUPT, t=9.0)
    bend(run, "drop rank=1 at=step:6/optimizer", fault=1, step=6, t=9.5)
    run.attempt(range(1, 6), wrong={5: "model"}, ending="hung", exits={}, **SAVED)
    finish(run)
    judgement = judged(f"{CORRUPT}; drop rank=1 at=step:6/optimizer")
    assert judgement.verdict is Verdict.RECOVERED, judgement.reason


def pause(run: Evidence, fault: str, *, rank: int, step: int) -> None:
    """Say that the second fault held a rank up for 0.3 s, and was over before anything else."""
    run.record(rank, 1, "event", t=8.0)
    run.strike(f"{fault} resume=0.3", rank=rank, fault=1, step=step, t=8.0)
    if fault.startswith("delay"):
        run.record(rank, 1, "delayed", fault=1, seconds=0.3, t=8.3)
    run.record(rank, 1, "event", t=8.3)


@pytest.mark.parametrize("error", ["", "FileNotFoundError"])
@pytest.mark.parametrize("delay", ["", "; delay rank=1 at=step:4/forward seconds=0.3"])
def test_an_attempt_that_ends_by_itself_is_not_explained(
    run: Evidence, judged: Any, error: str, delay: str
) -> None:
    bend(run, EARLY, step=3)
    if delay:
        pause(run, delay[2:], rank=1, step=4)
    if error:
        refused(run, error, steps=range(1, 6))
    else:
        hung(run, range(1, 6))
    assert judged(f"{EARLY}{delay}").verdict is Verdict.NOT_EXERCISED


def test_so_it_is_where_the_fault_has_shown_itself_in_another_attempt(
    run: Evidence, judged: Any
) -> None:
    again = f"{CORRUPT} persistent=yes"
    bend(run, again)
    bend(run, again, attempt=2, t=19.0)
    failed: dict[str, Any] = {"ending": "failed", "exits": {0: 1, 1: 1}, **SAVED}
    run.attempt(range(1, 7), wrong={5: "model"}, **failed)
    run.fail(rank=0, attempt=1, error="ReplicaMismatchError", t=11.0)
    run.attempt(range(5, 7), restored=4, source=1, **failed)
    run.fail(rank=0, attempt=2, error="FileNotFoundError", t=21.0)
    finish(run)
    judgement = judged(again)
    assert judgement.verdict is Verdict.UNRECOVERABLE
    assert "attempt 2 failed though no fault struck in it" in judgement.reason


@pytest.mark.parametrize(
    "other", ["stop rank=0 at=step:3/forward resume=0.3", "delay rank=0 at=step:3 seconds=0.3"]
)
def test_what_ends_no_attempt_does_not_explain_a_hang(
    run: Evidence, judged: Any, other: str
) -> None:
    bend(run, DROP)
    pause(run, other, rank=0, step=3)
    hung(run)
    assert judged(f"{DROP}; {other}").verdict is Verdict.RECOVERED


def test_nor_does_damage_to_a_checkpoint(run: Evidence, judged: Any) -> None:
    flip = "flip rank=1 at=step:5/data"
    run.strike(flip, t=8.0)
    bend(run, DROP, fault=1)
    kept: dict[str, Any] = {"published": (2, 4), "valid": (2,), "damaged": {4: "a digest differs"}}
    run.attempt(range(1, 5), ending="hung", exits={}, damage=(4,), **kept)
    run.attempt(range(3, 7), restored=2, source=1, published=(4, 6), valid=(2, 4, 6))
    judgement = judged(f"{flip}; {DROP}")
    assert judgement.verdict is Verdict.RECOVERED, judgement.reason


BUILD = "garble rank=1 at=collective/broadcast"


def test_a_wrong_beginning_that_nothing_came_of_is_excused(run: Evidence, judged: Any) -> None:
    bend(run, BUILD, step=None, t=8.0)
    wrong: dict[str, Any] = {"wrong": {1: "model"}, "wrong_at_start": "model"}
    run.attempt(range(1, 3), ending="failed", exits={0: 1, 1: 1}, **wrong)
    run.fail(rank=0, attempt=1, error="ReplicaMismatchError", t=11.0)
    run.attempt(ALL, published=(2, 4, 6), valid=(4, 6))
    judgement = judged(BUILD)
    assert judgement.verdict is Verdict.RECOVERED, judgement.reason


def test_one_that_was_gone_on_from_is_diverged(run: Evidence, judged: Any) -> None:
    bend(run, BUILD, step=None, t=8.0)
    run.attempt([], ending="failed", exits={0: 1, 1: 1}, wrong_at_start="model")
    run.fail(rank=0, attempt=1, error="ReplicaMismatchError", t=11.0)
    run.attempt(ALL, wrong_at_start="model", published=(2, 4, 6), valid=(4, 6))
    judgement = judged(BUILD)
    assert judgement.verdict is Verdict.DIVERGED
    assert "attempt 2, right after the start" in judgement.reason


def test_a_beginning_that_was_wrong_before_the_bend_is_not_excused(
    run: Evidence, judged: Any
) -> None:
    bend(run, CORRUPT, t=9.5)
    wrong: dict[str, Any] = {"wrong": {1: "model"}, "wrong_at_start": "model"}
    refused(run, "ReplicaMismatchError", steps=range(1, 7), published=(2, 4), **wrong)
    judgement = judged(CORRUPT)
    assert judgement.verdict is Verdict.DIVERGED
    assert "attempt 1, right after the start" in judgement.reason
