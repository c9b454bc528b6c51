"""Verdicts about state: RECOVERED if all is equal, DIVERGED with the name of what is not."""

from __future__ import annotations

from typing import Any

import pytest
from evidence import ALL, KILL, Evidence, finish, interrupt

from seatrial.chaos.verdict import Verdict

from .conftest import MakeEvidence


def test_a_clean_run_that_equals_the_reference_is_recovered(
    reference: Evidence, run: Evidence
) -> None:
    run.attempt(ALL, published=(2, 4, 6), valid=(4, 6))
    assert run.judged(reference, "clean").verdict is Verdict.RECOVERED


def test_a_killed_run_that_resumes_and_equals_the_reference_is_recovered(
    reference: Evidence, killed: Evidence
) -> None:
    finish(killed)
    judgement = killed.judged(reference, KILL)
    assert judgement.verdict is Verdict.RECOVERED
    assert (judgement.attempts, judgement.steps_lost) == (2, 0)
    assert judgement.recovery_s is not None
    assert judgement.recovery_s > 0


def test_steps_that_had_to_be_repeated_are_counted(reference: Evidence, run: Evidence) -> None:
    run.strike(KILL)
    interrupt(run, steps=range(1, 6))
    finish(run)
    judgement = run.judged(reference, KILL)
    assert (judgement.verdict, judgement.steps_lost) == (Verdict.RECOVERED, 1)


@pytest.mark.parametrize("component", ["optimizer", "scheduler", "rng", "sampler", "progress"])
def test_a_component_that_differs_right_after_the_restore_is_named(
    reference: Evidence, killed: Evidence, component: str
) -> None:
    finish(killed, wrong_at_start=component)
    judgement = killed.judged(reference, KILL)
    assert (judgement.verdict, judgement.component) == (Verdict.DIVERGED, component)
    assert "right after the restore of step 4" in judgement.reason
    assert f"{component}/x" in judgement.reason
    assert "it was equal" not in judgement.reason


def test_a_component_that_differs_later_is_named_with_its_step(
    reference: Evidence, killed: Evidence
) -> None:
    finish(killed, wrong={6: "scheduler"})
    judgement = killed.judged(reference, KILL)
    assert (judgement.verdict, judgement.component) == (Verdict.DIVERGED, "scheduler")
    assert judgement.step == 6
    assert "it was equal right after the restore" in judgement.reason


def test_a_difference_before_the_strike_is_found_too(reference: Evidence, run: Evidence) -> None:
    run.strike(KILL)
    interrupt(run, wrong={3: "rng"})
    finish(run)
    judgement = run.judged(reference, KILL)
    assert (judgement.verdict, judgement.component, judgement.step) == (Verdict.DIVERGED, "rng", 3)


def test_an_output_of_one_rank_that_differs_is_named(reference: Evidence, killed: Evidence) -> None:
    finish(killed, changed={(1, 6): {"loss": (0.5).hex()}})
    judgement = killed.judged(reference, KILL)
    assert (judgement.verdict, judgement.component) == (Verdict.DIVERGED, "outputs")
    assert "the loss of rank 1" in judgement.reason


@pytest.mark.parametrize(
    ("output", "component"),
    [("samples", "sampler"), ("learning rate", "scheduler"), ("loss scale", "scaler")],
)
def test_an_output_that_a_component_decides_is_blamed_on_it_before_the_consequences(
    make_evidence: MakeEvidence, output: str, component: str
) -> None:
    reference, run = make_evidence("reference"), make_evidence("run")
    usual: dict[tuple[int, int], dict[str, Any]] = {(1, 3): {output: [1, [1]]}}
    other: dict[tuple[int, int], dict[str, Any]] = {(1, 3): {output: [1, [0]], "loss": "0x1p-1"}}
    reference.attempt(ALL, published=(2, 4, 6), valid=(4, 6), changed=usual)
    run.attempt(ALL, published=(2, 4, 6), valid=(4, 6), changed=other, wrong={3: "optimizer"})
    judgement = run.judged(reference, "clean")
    assert (judgement.verdict, judgement.component) == (Verdict.DIVERGED, component)


def test_an_output_that_is_gone_differs(reference: Evidence, killed: Evidence) -> None:
    finish(killed, changed={(0, 6): {"loss": None}})
    assert killed.judged(reference, KILL).verdict is Verdict.DIVERGED


def test_a_resume_from_a_step_that_the_reference_never_reached_is_diverged(
    reference: Evidence, run: Evidence
) -> None:
    run.attempt(range(8, 10), restored=7, valid=(8,))
    assert run.judged(reference, "clean").verdict is Verdict.DIVERGED
