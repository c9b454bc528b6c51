"""Every verdict, reached by the evidence for it; and that missing evidence never passes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evidence import Evidence

from seatrial.chaos.samples import sample_faults
from seatrial.chaos.supervisor import PREEMPTED
from seatrial.chaos.trajectory import read_trajectory
from seatrial.chaos.verdict import Verdict

KILL = "kill rank=1 at=step:5/data"
KILLED = {0: 1, 1: -signal.SIGKILL}
ALL = range(1, 7)

MakeEvidence = Callable[[str], Evidence]


@pytest.fixture
def make_evidence(tmp_path: Path) -> MakeEvidence:
    return lambda name: Evidence(tmp_path / name)


@pytest.fixture
def reference(make_evidence: MakeEvidence) -> Evidence:
    """Six steps, never interrupted."""
    clean = make_evidence("reference")
    clean.attempt(ALL, published=(2, 4, 6), valid=(4, 6))
    return clean


@pytest.fixture
def killed(make_evidence: MakeEvidence) -> Evidence:
    """A run whose first attempt was killed in step 5, after the checkpoint of step 4."""
    run = make_evidence("run")
    run.strike(KILL)
    run.attempt(
        range(1, 5), ending="failed", exits=KILLED, published=(2, 4), valid=(2, 4), cause="killed"
    )
    return run


def finish(run: Evidence, **different: Any) -> None:
    """Add the second attempt as it should be, but for what is ``different``."""
    normal: dict[str, Any] = {"restored": 4, "source": 1, "published": (6,), "valid": (4, 6)}
    run.attempt(different.pop("steps", range(5, 7)), **normal | different)


def test_a_clean_run_that_equals_the_reference_is_recovered(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    run = make_evidence("run")
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


def test_steps_that_had_to_be_repeated_are_counted(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    run = make_evidence("run")
    run.strike(KILL)
    run.attempt(range(1, 6), ending="failed", exits=KILLED, published=(2, 4), valid=(2, 4))
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


def test_a_component_that_differs_later_is_named_with_its_step(
    reference: Evidence, killed: Evidence
) -> None:
    finish(killed, wrong={6: "scheduler"})
    judgement = killed.judged(reference, KILL)
    assert (judgement.verdict, judgement.component) == (Verdict.DIVERGED, "scheduler")
    assert judgement.step == 6
    assert "the scheduler was not restored" in judgement.reason


def test_a_difference_before_the_strike_is_found_too(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    run = make_evidence("run")
    run.strike(KILL)
    run.attempt(
        range(1, 5), ending="failed", exits=KILLED, valid=(2, 4), published=(2, 4), wrong={3: "rng"}
    )
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
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    run = make_evidence("run")
    run.attempt(range(8, 10), restored=7, valid=(8,))
    assert run.judged(reference, "clean").verdict is Verdict.DIVERGED


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
    assert killed.judged(reference, KILL).verdict is Verdict.LOST_WORK


def test_losing_more_steps_than_the_interval_is_lost_work(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    run = make_evidence("run")
    run.strike(KILL)
    run.attempt(range(1, 6), ending="failed", exits=KILLED, published=(2,), valid=(2,))
    finish(run, restored=2, steps=range(3, 7))
    judgement = run.judged(reference, KILL)
    assert (judgement.verdict, judgement.steps_lost) == (Verdict.LOST_WORK, 3)


def test_a_preempted_job_that_repeats_a_step_is_lost_work(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    text = "terminate rank=1 at=step:5/data"
    run = make_evidence("run")
    run.strike(text)
    exits = dict.fromkeys((0, 1), PREEMPTED)
    run.attempt(range(1, 6), ending="failed", exits=exits, published=(2, 4), valid=(2, 4))
    finish(run)
    assert run.judged(reference, text).verdict is Verdict.LOST_WORK


def test_a_published_checkpoint_that_is_damaged_without_a_fault_is_torn(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    run = make_evidence("run")
    run.strike(KILL)
    run.attempt(
        range(1, 5),
        ending="failed",
        exits=KILLED,
        published=(2, 4),
        valid=(2,),
        damaged={4: "shard cut"},
    )
    finish(run, restored=2, steps=range(3, 7))
    judgement = run.judged(reference, KILL)
    assert (judgement.verdict, judgement.step) == (Verdict.TORN, 4)
    assert "shard cut" in judgement.reason


def test_an_acknowledged_checkpoint_that_vanished_is_torn(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    run = make_evidence("run")
    run.strike(KILL)
    run.attempt(range(1, 5), ending="failed", exits=KILLED, published=(2, 4), valid=(2,))
    finish(run, restored=2, steps=range(3, 7))
    judgement = run.judged(reference, KILL)
    assert judgement.verdict is Verdict.TORN
    assert "acknowledged the checkpoint of step 4" in judgement.reason


def test_an_acknowledged_checkpoint_that_a_later_attempt_lost_is_torn(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    """It outlived its own attempt, was restored, and was gone before anything else was saved."""
    again = f"{KILL}; kill rank=1 at=step:5/data attempt=2"
    run = make_evidence("run")
    run.strike(KILL)
    run.attempt(range(1, 5), ending="failed", exits=KILLED, published=(2, 4), valid=(2, 4))
    run.strike(KILL, fault=1, attempt=2)
    run.attempt((), restored=4, source=1, ending="failed", exits=KILLED, valid=(2,))
    run.attempt(range(3, 7), restored=2, source=1, published=(4, 6), valid=(4, 6))
    judgement = run.judged(reference, again)
    assert judgement.verdict is Verdict.TORN
    assert (
        "attempt 1 acknowledged the checkpoint of step 4, but after attempt 2" in judgement.reason
    )


def test_an_acknowledgement_by_one_rank_counts(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    run = make_evidence("run")
    run.attempt(ALL, published=(2, 4, 6), valid=(2, 4))
    assert run.judged(reference, "clean").verdict is Verdict.TORN


def test_resuming_from_what_was_never_published_is_torn(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    run = make_evidence("run")
    run.strike(KILL)
    run.attempt(range(1, 5), ending="failed", exits=KILLED, published=(2,), valid=(2,))
    finish(run)
    judgement = run.judged(reference, KILL)
    assert judgement.verdict is Verdict.TORN
    assert "never published" in judgement.reason


FLIP = f"flip rank=1 at=step:5/data; {KILL} when=after"


@pytest.fixture
def flipped(make_evidence: MakeEvidence) -> Evidence:
    """A run in which the checkpoint of step 4 was damaged before the kill."""
    run = make_evidence("run")
    run.strike("flip", fault=0)
    run.strike("kill", fault=1)
    run.attempt(
        range(1, 5),
        ending="failed",
        exits=KILLED,
        published=(2, 4),
        valid=(2,),
        damaged={4: "digest"},
        damage=(4,),
    )
    return run


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


def test_an_attempt_that_hangs_though_nothing_struck_it_is_hung(
    reference: Evidence, killed: Evidence
) -> None:
    finish(killed, ending="hung", exits={}, steps=[5], published=(), valid=(2, 4), cause="silent")
    finish(killed)
    assert killed.judged(reference, KILL).verdict is Verdict.HUNG


def test_a_run_whose_last_attempt_hangs_is_hung(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    text = "stop rank=1 at=step:5/data"
    run = make_evidence("run")
    run.strike(text)
    run.attempt(range(1, 5), ending="hung", exits={}, published=(2, 4), valid=(2, 4))
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
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    text = "stop rank=1 at=step:5/data resume=1"
    run = make_evidence("run")
    run.strike(text)
    run.attempt(range(1, 5), ending="failed", exits={0: 1, 1: 1}, published=(2, 4), valid=(2, 4))
    finish(run)
    assert run.judged(reference, text).verdict is Verdict.UNRECOVERABLE


def test_giving_up_with_a_valid_checkpoint_is_stopped(
    reference: Evidence, killed: Evidence
) -> None:
    judgement = killed.judged(reference, KILL)
    assert judgement.verdict is Verdict.STOPPED
    assert "the checkpoint of step 4 is valid" in judgement.reason


def test_giving_up_before_anything_was_saved_is_stopped_and_says_so(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    run = make_evidence("run")
    run.strike(KILL)
    run.attempt([1], ending="failed", exits=KILLED, cause="killed")
    judgement = run.judged(reference, KILL)
    assert judgement.verdict is Verdict.STOPPED
    assert "step None" not in judgement.reason
    assert "nothing had been saved" in judgement.reason


def test_giving_up_without_any_valid_checkpoint_is_unrecoverable(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    run = make_evidence("run")
    run.strike("flip", fault=0)
    run.strike("kill", fault=1)
    run.attempt(
        range(1, 5),
        ending="failed",
        exits=KILLED,
        published=(4,),
        damaged={4: "digest"},
        damage=(4,),
    )
    run.attempt(
        (),
        ending="failed",
        exits={0: 1},
        damaged={4: "digest"},
        silent=(0, 1),
        error="NoValidCheckpointError",
    )
    assert run.judged(reference, FLIP).verdict is Verdict.UNRECOVERABLE


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


def test_a_fault_that_never_fired_is_not_exercised(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    run = make_evidence("run")
    run.attempt(ALL, published=(2, 4, 6), valid=(4, 6))
    judgement = run.judged(reference, KILL)
    assert judgement.verdict is Verdict.NOT_EXERCISED
    assert f"'{KILL}' never fired" in judgement.reason


def test_one_of_two_faults_that_never_fired_is_not_exercised(
    reference: Evidence, killed: Evidence
) -> None:
    finish(killed)
    judgement = killed.judged(reference, f"{KILL}; kill rank=0 at=restore attempt=2")
    assert judgement.verdict is Verdict.NOT_EXERCISED


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("kill rank=1 at=step:5/data", 0),
        ("kill rank=1 at=step:5/data", 1),
        ("exit rank=1 at=step:5/data code=3", 4),
        ("raise rank=1 at=step:5/data", 0),
        ("oom rank=1 at=step:5/data", 0),
        ("terminate rank=1 at=step:5/data", 0),
        ("terminate rank=1 at=step:5/data", 1),
        ("stop rank=1 at=step:5/data", 0),
    ],
)
def test_a_fault_without_its_effect_is_not_exercised(
    reference: Evidence, make_evidence: MakeEvidence, text: str, status: int
) -> None:
    run = make_evidence("run")
    run.strike(text)
    run.attempt(ALL, published=(2, 4, 6), valid=(4, 6), exits={0: 0, 1: status})
    judgement = run.judged(reference, text)
    assert judgement.verdict is Verdict.NOT_EXERCISED
    assert "changed nothing" in judgement.reason


@pytest.mark.parametrize(
    ("text", "exits"),
    [
        ("kill rank=* at=step:5/data", {0: 1, 1: -signal.SIGKILL}),
        ("kill rank=* at=step:5/data", {1: -signal.SIGKILL}),
        ("exit rank=* at=step:5/data code=3", {0: 1, 1: 3}),
        ("raise rank=* at=step:5/data", {0: 0, 1: 1}),
        ("terminate rank=* at=step:5/data", {0: 1, 1: PREEMPTED}),
        ("stop rank=* at=step:5/data", {0: 1}),
    ],
)
def test_a_fault_of_several_ranks_must_show_its_effect_on_each(
    reference: Evidence, make_evidence: MakeEvidence, text: str, exits: dict[int, int]
) -> None:
    run = make_evidence("run")
    run.strike(text, rank=0)
    run.strike(text, rank=1)
    run.attempt(range(1, 5), ending="failed", exits=exits, published=(2, 4), valid=(2, 4))
    finish(run)
    judgement = run.judged(reference, text)
    assert judgement.verdict is Verdict.NOT_EXERCISED
    assert "fired on rank 0" in judgement.reason


def test_a_struck_rank_that_the_launcher_ended_after_another_does_not_count_against_it(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    text = "exit rank=* at=step:5/data code=3"
    run = make_evidence("run")
    run.strike(text, rank=0)
    run.strike(text, rank=1)
    run.attempt(range(1, 5), ending="failed", exits={1: 3}, published=(2, 4), valid=(2, 4))
    finish(run)
    assert run.judged(reference, text).verdict is Verdict.RECOVERED


def test_a_signal_to_a_rank_that_the_launcher_ended_is_not_exercised(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    text = "terminate rank=1 at=step:5/data"
    run = make_evidence("run")
    run.strike(text)
    run.attempt(range(1, 5), ending="failed", exits={0: 1}, published=(2, 4), valid=(2, 4))
    finish(run)
    assert run.judged(reference, text).verdict is Verdict.NOT_EXERCISED


def test_a_signal_that_found_no_process_is_not_exercised(
    reference: Evidence, killed: Evidence
) -> None:
    killed.record(0, 1, "missed", fault=KILL, rank=1, signal="SIGKILL")
    finish(killed)
    assert killed.judged(reference, KILL).verdict is Verdict.NOT_EXERCISED


@pytest.mark.parametrize(
    ("error", "causes", "verdict"),
    [
        ("InjectedError", [], Verdict.RECOVERED),
        ("SaveError", ["InjectedError"], Verdict.RECOVERED),
        ("KeyError", [], Verdict.NOT_EXERCISED),
    ],
)
def test_a_raise_must_be_what_the_rank_died_of(
    reference: Evidence,
    make_evidence: MakeEvidence,
    error: str,
    causes: list[str],
    verdict: Verdict,
) -> None:
    text = "raise rank=1 at=step:5/data"
    run = make_evidence("run")
    run.strike(text)
    run.attempt(range(1, 5), ending="failed", exits={0: 1, 1: 1}, published=(2, 4), valid=(2, 4))
    run.fail(rank=1, attempt=1, error=error, causes=causes, t=10.1)
    finish(run)
    assert run.judged(reference, text).verdict is verdict


def test_an_attempt_that_was_failing_before_it_was_struck_is_unrecoverable(
    reference: Evidence, killed: Evidence
) -> None:
    killed.fail(rank=0, attempt=1, error="KeyError", t=9.9)  # the strike is at 10
    finish(killed)
    judgement = killed.judged(reference, KILL)
    assert judgement.verdict is Verdict.UNRECOVERABLE
    assert "rank 0 raised KeyError" in judgement.reason


def test_a_stop_that_outlasts_the_deadline_has_its_effect_and_explains_the_hang(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    text = "stop rank=1 at=step:5/data resume=60"
    run = make_evidence("run")
    run.strike(text)
    run.attempt(range(1, 5), ending="hung", exits={}, published=(2, 4), valid=(2, 4))
    finish(run)
    assert run.judged(reference, text).verdict is Verdict.RECOVERED


def test_a_rank_that_did_more_after_its_stop_was_not_stopped(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    text = "stop rank=1 at=step:5/data"
    run = make_evidence("run")
    run.strike(text)
    run.attempt(range(1, 5), ending="hung", exits={}, published=(2, 4), valid=(2, 4))
    run.record(1, 1, "event", event="forward", edge="before", step=5, t=12.0)
    finish(run)
    assert run.judged(reference, text).verdict is Verdict.NOT_EXERCISED


def test_a_swallowed_exception_is_not_excused_by_a_later_kill(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    run = make_evidence("run")
    run.strike("raise", fault=0, step=2)
    run.strike("kill", fault=1)
    run.attempt(range(1, 5), ending="failed", exits=KILLED, published=(2, 4), valid=(2, 4))
    finish(run)
    judgement = run.judged(reference, f"raise rank=1 at=step:2/data; {KILL}")
    assert judgement.verdict is Verdict.NOT_EXERCISED


def test_damage_that_left_the_checkpoint_valid_is_not_exercised(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    run = make_evidence("run")
    run.strike("flip", fault=0)
    run.strike("kill", fault=1)
    run.attempt(
        range(1, 5), ending="failed", exits=KILLED, published=(2, 4), valid=(2, 4), damage=(4,)
    )
    finish(run)
    assert run.judged(reference, FLIP).verdict is Verdict.NOT_EXERCISED


def test_damage_that_no_restore_came_upon_is_not_exercised(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    run = make_evidence("run")
    run.strike("flip", fault=0)
    run.attempt(ALL, published=(2, 4, 6), valid=(4, 6), damage=(2,))
    assert run.judged(reference, "flip rank=1 at=step:3/data").verdict is Verdict.NOT_EXERCISED


def test_damage_that_a_newer_checkpoint_hides_is_not_exercised(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    run = make_evidence("run")
    run.strike("flip", fault=0)
    run.strike("kill", fault=1)
    run.attempt(
        range(1, 5),
        ending="failed",
        exits=KILLED,
        published=(2, 4),
        valid=(4,),
        damaged={2: "digest"},
        damage=(2,),
    )
    finish(run)
    assert run.judged(reference, FLIP).verdict is Verdict.NOT_EXERCISED


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
    reference: Evidence, make_evidence: MakeEvidence, rank: int
) -> None:
    text = "kill rank=1 at=exit"
    run = make_evidence("run")
    run.strike(text)
    run.attempt(ALL, ending="failed", exits=KILLED, published=(2, 4, 6), valid=(4, 6))
    finish(run, restored=6, steps=(), published=(), silent=[rank])
    assert run.judged(reference, text).verdict is Verdict.UNRECOVERABLE


def test_a_run_without_any_trace_never_passes(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    run = make_evidence("run")
    run.attempt((), silent=[0, 1])
    assert run.judged(reference, "clean").verdict is Verdict.UNRECOVERABLE
    assert run.judged(reference, "clean", steps=range(0)).verdict is Verdict.UNRECOVERABLE


def test_a_run_without_steps_never_passes_even_where_none_are_expected(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    run = make_evidence("run")
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
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    run = make_evidence("run")
    run.strike(KILL)
    run.attempt(range(1, 6), ending="failed", exits=KILLED, published=(2, 4), valid=(2, 4))
    finish(run)
    assert run.judged(reference, KILL).verdict is Verdict.RECOVERED


def test_a_kill_of_all_ranks_that_ended_only_one_is_not_exercised(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    run = make_evidence("run")
    for rank in range(2):
        run.strike("kill rank=*", rank=rank)
    run.attempt(
        range(1, 5), ending="failed", exits=KILLED, published=(2, 4), valid=(2, 4), cause="killed"
    )
    finish(run)
    judgement = run.judged(reference, "kill rank=* at=step:5/data")
    assert judgement.verdict is Verdict.NOT_EXERCISED
    assert "rank 0" in judgement.reason


def test_a_control_that_begins_in_an_epoch_is_not_blamed_for_its_first_half(
    reference: Evidence, make_evidence: MakeEvidence
) -> None:
    run = make_evidence("run")
    run.attempt(range(2, 4), restored=1, source=1, valid=(1,))
    faults = list(sample_faults(read_trajectory(run.run)))
    assert faults == []
