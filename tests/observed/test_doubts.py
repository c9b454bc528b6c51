"""What may have had another cause proves nothing of a fault: never a pass by accident.

Each run here is one that recovered, with a fault whose bytes somebody read, and something else that
explains all that is seen. Does not: run a job; see `test_trials.py`.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from disk_evidence import CORRUPT, FILE, KILL, DiskEvidence
from evidence import Evidence, finish, interrupt, state

from seatrial.chaos.verdict import Verdict

MISREAD = "corrupt rank=1 at=storage/read attempt=2"
FAILED: dict[str, Any] = {"ending": "failed", "exits": {0: 1, 1: 1}, "cause": "failed"}


@pytest.fixture
def run(tmp_path: Path) -> DiskEvidence:
    return DiskEvidence(tmp_path / "run")


def killed(run: DiskEvidence, *, own: bool = True, **different: Any) -> None:
    """Attempt 1: killed in step 5."""
    interrupt(run, **{"cause": "x"} | different)
    if own:
        run.is_the_jobs()


def misread(run: DiskEvidence) -> None:
    """Rank 1 is given a wrong bit when it restores in attempt 2."""
    run.strike(MISREAD, fault=1, attempt=2, step=None, event="storage/read", t=16.0)
    facts = {"fault": 1, "event": "storage/read", "file": FILE, "change": "bit 0 flipped"}
    run.saw(1, 2, "operation", t=16.0, **facts, changed=True)
    run.saw(1, 2, "met", t=16.0, fault=1, file=FILE, step=4)


@pytest.mark.parametrize(("own", "begins"), [(False, False), (True, True)])
def test_an_error_long_after_the_reading_is_not_of_it(
    reference: Evidence, run: DiskEvidence, own: bool, begins: bool
) -> None:
    """This project's store says what it does not accept; and who began had accepted it."""
    run.strike(KILL, fault=0)
    killed(run, own=own)
    misread(run)
    run.attempt((), restored=4, source=1, silent=() if begins else (0, 1), valid=(2, 4), **FAILED)
    run.fail(rank=1, attempt=2, error="RuntimeError", t=19.5, message="address already in use")
    if own:
        run.is_the_jobs()
    finish(run)
    judgement = run.judged(reference, f"{KILL}; {MISREAD}")
    assert judgement.verdict is not Verdict.RECOVERED, judgement.reason


def began(run: DiskEvidence, rank: int, attempt: int, *, wrong: str = "", t: float = 16.5) -> None:
    """One rank alone began from step 4."""
    facts = {"restored": 4, "source": 1, "damaged": [], "notes": [], "samples_per_epoch": None}
    found = state(rank, 4, [wrong] if wrong else ())
    run.record(rank, attempt, "began", t=t, **facts, fingerprint=found)


def finished(run: DiskEvidence, *, restored: int = 4) -> None:
    run.attempt(range(restored + 1, 7), restored=restored, source=1, published=(6,), valid=(4, 6))
    run.is_the_jobs()


@pytest.mark.parametrize("wrong", ["", "model"])
def test_an_attempt_that_another_fault_ended_shows_only_what_ranks_had_accepted(
    reference: Evidence, run: DiskEvidence, wrong: str
) -> None:
    second = "kill rank=0 at=restore attempt=2"
    run.strike(KILL, fault=0)
    killed(run)
    misread(run)
    began(run, 1, 2, wrong=wrong)
    run.strike(second, fault=2, attempt=2, rank=0, t=17.0)
    run.attempt((), silent=(0, 1), valid=(2, 4), **FAILED | {"exits": {0: -signal.SIGKILL, 1: 1}})
    run.fail(rank=1, attempt=2, error="RuntimeError", t=17.5, message="connection closed by peer")
    run.is_the_jobs()
    finished(run)
    judgement = run.judged(reference, f"{KILL}; {MISREAD}; {second}")
    expected = Verdict.CORRUPTION_UNDETECTED if wrong else Verdict.NOT_EXERCISED
    assert judgement.verdict is expected, judgement.reason
    said = "model/x differs" if wrong else "attempt 2 ended of something else"
    assert said in judgement.reason


@pytest.mark.parametrize("is_struck", [True, False])
def test_an_error_counts_for_a_reading_only_if_no_other_fault_explains_it(
    reference: Evidence, run: DiskEvidence, is_struck: bool
) -> None:
    second = "kill rank=0 at=restore attempt=2"
    run.strike(KILL, fault=0)
    killed(run)
    misread(run)
    if is_struck:
        run.strike(second, fault=2, attempt=2, rank=0, t=15.5)
    exits = {0: -signal.SIGKILL if is_struck else 1, 1: 1}
    run.attempt((), silent=(0, 1), valid=(2, 4), **FAILED | {"exits": exits})
    run.fail(rank=1, attempt=2, error="RuntimeError", t=17.5, message="something")
    run.is_the_jobs()
    finished(run)
    judgement = run.judged(reference, f"{KILL}; {MISREAD}{f'; {second}' * is_struck}")
    expected = Verdict.NOT_EXERCISED if is_struck else Verdict.RECOVERED
    assert judgement.verdict is expected, judgement.reason
    # It names no file, so that it failed of the reading is not said without a word.
    notes = [note for note in judgement.notes if "likely" in note]
    assert len(notes) == (not is_struck)
    assert is_struck or "RuntimeError: something" in notes[0]


def corrupted(run: DiskEvidence, *attempts: int) -> None:
    """A write of rank 1 in step 4 was corrupted; it reads it in those attempts."""
    run.strike(CORRUPT, fault=0, step=4, event="storage/write", t=8.0)
    facts = {"fault": 0, "event": "storage/write", "file": FILE, "change": "bit 0 flipped"}
    run.saw(1, 1, "operation", t=8.0, **facts, changed=True)
    run.saw(1, 1, "damage", t=8.0, **facts, step=4)
    for attempt in attempts:
        run.saw(1, attempt, "met", fault=0, file=FILE, step=4)


@pytest.mark.parametrize(
    ("failing", "began_before", "reads_again", "verdict"),
    [
        (1, None, False, Verdict.RECOVERED),
        (0, None, False, Verdict.RECOVERED),  # on behalf of rank 1
        (0, 0, False, Verdict.UNRECOVERABLE),
        (0, 1, False, Verdict.CORRUPTION_UNDETECTED),
        (1, None, True, Verdict.NOT_EXERCISED),  # so it was not that
    ],
)
def test_a_restart_that_failed_is_explained_by_what_was_read_if_nobody_accepted_it(
    reference: Evidence, run: DiskEvidence, failing: int, began_before: int | None,
    reads_again: bool, verdict: Verdict,
) -> None:  # fmt: skip
    run.strike(KILL, fault=1)
    corrupted(run, 2, *((3,) if reads_again else ()))
    killed(run, valid=(2,))
    if began_before is not None:
        began(run, began_before, 2, wrong="model" if began_before == 1 else "", t=18.5)
    run.attempt((), silent=(0, 1), valid=(2,), **FAILED)
    run.fail(rank=failing, attempt=2, error="ValueError", t=19.0, message="x")
    run.is_the_jobs()
    finished(run, restored=4 if reads_again else 2)
    if not reads_again:
        run.saw(1, 3, "met", fault=0, file=FILE, step=4)
    judgement = run.judged(reference, f"{CORRUPT}; {KILL}")
    assert judgement.verdict is verdict, judgement.reason


def test_of_two_damages_that_were_read_neither_is_known_to_be_why_it_failed(
    reference: Evidence, run: DiskEvidence
) -> None:
    other = "corrupt rank=0 at=step:4/storage/write"
    run.strike(KILL, fault=1)
    corrupted(run, 2, 3)
    run.strike(other, fault=2, rank=0, step=4, event="storage/write", t=8.0)
    facts = {"fault": 2, "event": "storage/write", "file": "/disk/store/ckpt-4/sum-0"}
    run.saw(0, 1, "operation", t=8.0, **facts, change="x", changed=True)
    run.saw(0, 1, "damage", t=8.0, **facts, change="x", step=4)
    run.saw(0, 2, "met", fault=2, file=facts["file"], step=4)
    killed(run, valid=(2,))
    run.attempt((), silent=(0, 1), valid=(2,), **FAILED)
    run.fail(rank=0, attempt=2, error="ValueError", t=19.0, message="x")
    run.is_the_jobs()
    finished(run, restored=2)
    judgement = run.judged(reference, f"{CORRUPT}; {KILL}; {other}")
    assert judgement.verdict is Verdict.NOT_EXERCISED, judgement.reason


CORRUPT_TOO = "corrupt rank=0 at=step:4/storage/write"
LOSE = "lose rank=0 at=step:4/storage/rename"
FULL = "fail rank=0 at=step:6/storage/write"
UNREADABLE = "fail rank=0 at=storage/stat attempt=2"


@pytest.mark.parametrize(
    ("second", "different", "says"),
    [
        ("", {}, ""),
        ("", {"published": (2,)}, "the checkpoint of step 4 was not whole"),
        (CORRUPT_TOO, {}, CORRUPT_TOO),
        (LOSE, {}, LOSE),
        (UNREADABLE, {}, UNREADABLE),
        (FULL, {}, ""),  # of another checkpoint
    ],
)
def test_a_restart_that_fell_back_proves_something_only_if_nothing_else_explains_it(
    reference: Evidence, run: DiskEvidence, second: str, different: dict[str, Any], says: str
) -> None:
    run.strike(KILL, fault=1)
    corrupted(run, 2)
    if second:
        event, attempt = second.split("at=")[1].split()[0].rpartition("/storage/")[2], 1
        if second == UNREADABLE:
            event, attempt = "stat", 2
        facts = {"fault": 2, "event": f"storage/{event}", "file": "/disk/store/ckpt-4/rank-0"}
        step, t = (6, 9.5) if second == FULL else (4, 8.0)
        run.strike(second, fault=2, rank=0, attempt=attempt, step=None if attempt == 2 else step,
                   event=f"storage/{event}", t=t + 8 * (attempt - 1))  # fmt: skip
        run.saw(0, attempt, "operation", t=t, **facts, change="x", changed=True)
        if second == CORRUPT_TOO:
            run.saw(0, 1, "damage", t=t, **facts, change="x", step=4)
            run.saw(0, 2, "met", t=18.0, fault=2, file=facts["file"], step=4)
        if second == FULL:
            run.fail(rank=0, attempt=1, error="OSError", t=9.6, causes=["OSError"],
                     message=f"I/O (injected by the fault '{FULL}')")  # fmt: skip
    killed(run, **{"valid": (2,)} | different)
    finished(run, restored=2)
    judgement = run.judged(reference, f"{CORRUPT}; {KILL}{f'; {second}' * bool(second)}")
    expected = Verdict.NOT_EXERCISED if says else Verdict.RECOVERED
    assert judgement.verdict is expected, judgement.reason
    assert says in judgement.reason
    assert not says or "went back to step 2" in judgement.reason


@pytest.mark.parametrize("is_copied", [True, False])
def test_a_copy_of_what_was_changed_is_named_as_the_likely_reason_why_nobody_met_it(
    reference: Evidence, run: DiskEvidence, is_copied: bool
) -> None:
    run.strike(KILL, fault=1)
    corrupted(run, *((1,) if is_copied else ()))
    killed(run, valid=(2,))
    finished(run)
    judgement = run.judged(reference, f"{CORRUPT}; {KILL}")
    assert judgement.verdict is Verdict.NOT_EXERCISED
    assert ("perhaps for a copy" in judgement.reason) == is_copied
