"""NOT_EXERCISED: a fault that did not fire, or did not do what it is for."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from evidence import ALL, FLIP, KILL, Evidence, finish, interrupt

from seatrial.chaos.supervisor import PREEMPTED
from seatrial.chaos.verdict import Verdict


def test_a_fault_that_never_fired_is_not_exercised(reference: Evidence, run: Evidence) -> None:
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
    reference: Evidence, run: Evidence, text: str, status: int
) -> None:
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
    reference: Evidence, run: Evidence, text: str, exits: dict[int, int]
) -> None:
    run.strike(text, rank=0)
    run.strike(text, rank=1)
    interrupt(run, exits=exits)
    finish(run)
    judgement = run.judged(reference, text)
    assert judgement.verdict is Verdict.NOT_EXERCISED
    assert "fired on rank 0" in judgement.reason


def test_a_struck_rank_that_the_launcher_ended_after_another_does_not_count_against_it(
    reference: Evidence, run: Evidence
) -> None:
    text = "exit rank=* at=step:5/data code=3"
    run.strike(text, rank=0)
    run.strike(text, rank=1)
    interrupt(run, exits={1: 3})
    finish(run)
    assert run.judged(reference, text).verdict is Verdict.RECOVERED


def test_a_signal_to_a_rank_that_the_launcher_ended_is_not_exercised(
    reference: Evidence, run: Evidence
) -> None:
    text = "terminate rank=1 at=step:5/data"
    run.strike(text)
    interrupt(run, exits={0: 1})
    finish(run)
    assert run.judged(reference, text).verdict is Verdict.NOT_EXERCISED


def test_a_signal_that_found_no_process_is_not_exercised(
    reference: Evidence, killed: Evidence
) -> None:
    killed.record(0, 1, "missed", fault=KILL, rank=1, signal="SIGKILL")
    finish(killed)
    assert killed.judged(reference, KILL).verdict is Verdict.NOT_EXERCISED


RAISE = "raise rank=1 at=step:5/data"
RAISED = f"injected by the fault '{RAISE}'"


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        ({"error": "InjectedError", "message": RAISED}, Verdict.RECOVERED),
        (
            {"error": "SaveError", "causes": ["InjectedError"], "said": [RAISED]},
            Verdict.RECOVERED,
        ),
        ({"error": "KeyError"}, Verdict.NOT_EXERCISED),
    ],
)
def test_a_raise_must_be_what_the_rank_died_of(
    reference: Evidence, run: Evidence, error: dict[str, Any], verdict: Verdict
) -> None:
    run.strike(RAISE)
    interrupt(run, exits={0: 1, 1: 1})
    run.fail(rank=1, attempt=1, t=10.1, **error)
    finish(run)
    assert run.judged(reference, RAISE).verdict is verdict


def test_a_raise_that_was_swallowed_has_no_part_in_a_later_one(
    reference: Evidence, run: Evidence
) -> None:
    swallowed = "raise rank=1 at=step:3/data"
    run.strike(swallowed, step=3, t=9.5)
    run.strike(RAISE, fault=1)
    interrupt(run, exits={0: 1, 1: 1})
    run.fail(rank=1, attempt=1, t=10.1, error="InjectedError", message=RAISED)
    finish(run)
    judgement = run.judged(reference, f"{swallowed}; {RAISE}")
    assert judgement.verdict is Verdict.NOT_EXERCISED
    assert f"the fault '{swallowed}' fired" in judgement.reason


def test_an_exit_of_a_worker_that_its_rank_fails_of_is_not_exercised(
    reference: Evidence, run: Evidence
) -> None:
    text = "exit rank=1 at=step:5/data"  # with code 1, as after any exception
    run.strike(text)
    interrupt(run, exits={0: 1, 1: 1})
    run.fail(rank=1, attempt=1, t=10.1, error="RuntimeError", message="DataLoader worker exited")
    finish(run)
    assert run.judged(reference, text).verdict is Verdict.NOT_EXERCISED


@pytest.mark.parametrize(("grace", "verdict"), [(30.0, "NOT_EXERCISED"), (0.2, "RECOVERED")])
def test_a_sigterm_that_was_ignored_has_no_part_in_the_kill_of_another_fault(
    reference: Evidence, run: Evidence, grace: float, verdict: str
) -> None:
    told = f"terminate rank=1 at=step:3/data grace={grace}"
    run.strike(told, step=3, t=9.5, grace=grace)
    run.strike(KILL, fault=1)
    interrupt(run)
    finish(run)
    assert run.judged(reference, f"{told}; {KILL}").verdict == verdict


def test_an_attempt_that_was_failing_before_it_was_struck_is_unrecoverable(
    reference: Evidence, killed: Evidence
) -> None:
    killed.fail(rank=0, attempt=1, error="KeyError", t=9.9)  # the strike is at 10
    finish(killed)
    judgement = killed.judged(reference, KILL)
    assert judgement.verdict is Verdict.UNRECOVERABLE
    assert "rank 0 raised KeyError" in judgement.reason


def test_so_is_one_that_a_rank_was_leaving(reference: Evidence, killed: Evidence) -> None:
    killed.record(0, 1, "ended", status=3, t=9.9)
    finish(killed)
    judgement = killed.judged(reference, KILL)
    assert judgement.verdict is Verdict.UNRECOVERABLE
    assert (
        "was failing before a fault struck in it: rank 0 left with exit code 3" in judgement.reason
    )


@pytest.mark.parametrize(
    ("t", "verdict"), [(9.9, Verdict.UNRECOVERABLE), (10.1, Verdict.RECOVERED)]
)
def test_so_is_one_in_which_a_rank_was_killed_by_what_no_fault_is(
    reference: Evidence, run: Evidence, t: float, verdict: Verdict
) -> None:
    run.strike(KILL)  # of rank 1, at 10
    died = {0: -signal.SIGSEGV, 1: -signal.SIGKILL}
    interrupt(run, exits=died, heard={0: t, 1: 10.2})
    finish(run)
    judgement = run.judged(reference, KILL)
    assert judgement.verdict is verdict
    if verdict is Verdict.UNRECOVERABLE:
        assert "rank 0 was killed by SIGSEGV" in judgement.reason


@pytest.mark.parametrize(("step", "verdict"), [(2, "NOT_EXERCISED"), (3, "RECOVERED")])
def test_a_sigterm_that_was_ignored_has_no_part_in_a_later_preemption(
    reference: Evidence, run: Evidence, step: int, verdict: str
) -> None:
    ignored, heeded = f"terminate rank=1 at=step:{step}/data", "terminate rank=0 at=step:4/data"
    run.strike(ignored, step=step, t=8.0)
    run.strike(heeded, rank=0, fault=1, step=4)
    left = {0: PREEMPTED, 1: PREEMPTED}
    interrupt(run, exits=left)
    finish(run)
    assert run.judged(reference, f"{ignored}; {heeded}").verdict == verdict


def test_a_stop_that_outlasts_the_deadline_has_its_effect_and_explains_the_hang(
    reference: Evidence, run: Evidence
) -> None:
    text = "stop rank=1 at=step:5/data resume=60"
    run.strike(text)
    interrupt(run, ending="hung", exits={})
    finish(run)
    assert run.judged(reference, text).verdict is Verdict.RECOVERED


def test_a_rank_that_did_more_after_its_stop_was_not_stopped(
    reference: Evidence, run: Evidence
) -> None:
    text = "stop rank=1 at=step:5/data"
    run.strike(text)
    interrupt(run, ending="hung", exits={})
    run.record(1, 1, "event", event="forward", edge="before", step=5, t=12.0)
    finish(run)
    assert run.judged(reference, text).verdict is Verdict.NOT_EXERCISED


def test_a_swallowed_exception_is_not_excused_by_a_later_kill(
    reference: Evidence, run: Evidence
) -> None:
    run.strike("raise", fault=0, step=2)
    run.strike("kill", fault=1)
    interrupt(run)
    finish(run)
    judgement = run.judged(reference, f"raise rank=1 at=step:2/data; {KILL}")
    assert judgement.verdict is Verdict.NOT_EXERCISED


def test_damage_that_left_the_checkpoint_valid_is_not_exercised(
    reference: Evidence, flipping: Evidence
) -> None:
    interrupt(flipping, damage=(4,))
    finish(flipping)
    assert flipping.judged(reference, FLIP).verdict is Verdict.NOT_EXERCISED


def test_damage_that_no_restore_came_upon_is_not_exercised(
    reference: Evidence, run: Evidence
) -> None:
    run.strike("flip", fault=0)
    run.attempt(ALL, published=(2, 4, 6), valid=(4, 6), damage=(2,))
    assert run.judged(reference, "flip rank=1 at=step:3/data").verdict is Verdict.NOT_EXERCISED


def test_damage_that_a_newer_checkpoint_hides_is_not_exercised(
    reference: Evidence, flipping: Evidence
) -> None:
    interrupt(flipping, valid=(4,), damaged={2: "digest"}, damage=(2,))
    finish(flipping)
    assert flipping.judged(reference, FLIP).verdict is Verdict.NOT_EXERCISED
