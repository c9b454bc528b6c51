"""What a judge makes of bent collectives: their effect, and what of a run they may excuse."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evidence import Evidence

from seatrial.chaos.verdict import Judgement, Verdict

SWAP = "reorder rank=1 at=step:5/collective/all_reduce"
CORRUPT = "garble rank=1 at=step:5/collective/all_reduce"
ALL = range(1, 7)


@pytest.fixture
def reference(tmp_path: Path) -> Evidence:
    """Six steps, never interrupted."""
    clean = Evidence(tmp_path / "reference")
    clean.attempt(ALL, published=(2, 4, 6), valid=(4, 6))
    return clean


@pytest.fixture
def run(tmp_path: Path) -> Evidence:
    return Evidence(tmp_path / "run")


@pytest.fixture
def judged(reference: Evidence, run: Evidence) -> Callable[[str], Judgement]:
    return lambda schedule: run.judged(reference, schedule)


def bend(run: Evidence, fault: str, *, what: str = "was bent", unable: str = "") -> None:
    run.strike(fault)
    run.record(1, 1, "bent", fault=0, call="all_reduce of dp", what=what, unable=unable)


def refused(run: Evidence, error: str, **different: Any) -> None:
    """An attempt that ended of it after the checkpoint of step 4, and one that went on from there.

    ``different`` is of the first attempt.
    """
    steps = different.pop("steps", range(1, 5))
    normal: dict[str, Any] = {"published": (2, 4), "valid": (2, 4)}
    run.attempt(steps, ending="failed", exits={0: 1, 1: 1}, **normal | different)
    for rank in (0, 1):
        run.fail(rank=rank, attempt=1, error=error, t=11.0)
    run.attempt(range(5, 7), restored=4, source=1, published=(6,), valid=(4, 6))


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
    run.attempt(
        range(1, 5),
        ending="failed",
        exits={0: 1, 1: -signal.SIGKILL},
        published=(2, 4),
        valid=(2, 4),
    )
    run.fail(rank=0, attempt=1, error="RuntimeError", t=11.0)
    run.attempt(range(5, 7), restored=4, source=1, published=(6,), valid=(4, 6))
    judgement = judged(f"{SWAP}; {kill}")
    assert judgement.verdict is Verdict.NOT_EXERCISED
    assert "reorder" in judgement.reason
