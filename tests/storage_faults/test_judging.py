"""What a verdict makes of the evidence of altered operations: the unnoticed ones above all."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from evidence import Evidence, finish, interrupt

from seatrial.chaos.case import Case
from seatrial.chaos.schedule import Schedule
from seatrial.chaos.trajectory import read_trajectory
from seatrial.chaos.verdict import Verdict

KILL = "kill rank=1 at=step:5/data"
KILLED = {0: 1, 1: -signal.SIGKILL}
CORRUPT = "corrupt rank=1 at=storage/read attempt=2"
FILE = "/store/step-00000004/attempt-1/rank-00001.safetensors"

MakeRun = Callable[..., Evidence]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """A run that was killed in step 5; its second attempt read ``FILE`` wrongly at ``event``."""

    def make(*, event: str, changed: bool = True, restored: int = 4) -> Evidence:
        run = Evidence(tmp_path / "run")
        run.strike(KILL, fault=0)
        interrupt(run, cause="x")
        run.strike(CORRUPT, fault=1, attempt=2, event="storage/read")
        run.record(1, 2, "event", event=event, edge="before", step=4)
        facts = {"fault": 1, "event": "storage/read", "file": FILE, "change": "bit 0 flipped"}
        run.record(1, 2, "operation", **facts, changed=changed)
        if changed:
            run.record(1, 2, "damage", **facts, step=4)
        run.record(1, 2, "event", event=event, edge="after", step=4)
        run.attempt(
            range(restored + 1, 7), restored=restored, source=1, published=(6,), valid=(4, 6)
        )
        return run

    return make


def test_bytes_that_were_read_wrongly_and_accepted_are_corruption(
    reference: Evidence, make_run: MakeRun
) -> None:
    run = make_run(event="restore/shard/read")
    judgement = run.judged(reference, f"{KILL}; {CORRUPT}")
    assert judgement.verdict is Verdict.CORRUPTION_UNDETECTED
    assert FILE in judgement.reason
    assert "bit 0 flipped" in judgement.reason


def test_a_wrong_reading_that_no_restore_used_proves_nothing(
    reference: Evidence, make_run: MakeRun
) -> None:
    run = make_run(event="checkpoint/collect")
    judgement = run.judged(reference, f"{KILL}; {CORRUPT}")
    assert judgement.verdict is Verdict.NOT_EXERCISED
    assert "neither did a restore meet" in judgement.reason


def test_a_wrong_reading_after_which_another_step_was_restored_was_met(
    reference: Evidence, make_run: MakeRun
) -> None:
    run = make_run(event="restore/shard/read", restored=2)
    judgement = run.judged(reference, f"{KILL}; {CORRUPT}")
    assert judgement.verdict is not Verdict.CORRUPTION_UNDETECTED


def test_an_operation_that_was_not_altered_proves_nothing(
    reference: Evidence, make_run: MakeRun
) -> None:
    run = make_run(event="restore/shard/read", changed=False)
    judgement = run.judged(reference, f"{KILL}; {CORRUPT}")
    assert judgement.verdict is Verdict.NOT_EXERCISED
    assert "could change nothing: bit 0 flipped" in judgement.reason


def failed(
    tmp_path: Path,
    text: str,
    *,
    t: float,
    message: str = "",
    lasts_s: float | None = None,
    error: str = "SaveError",
    causes: tuple[str, ...] = (),
) -> Evidence:
    """A run whose first attempt failed at ``t`` in the save of step 6, after a strike at 10.0."""
    run = Evidence(tmp_path / "run")
    run.strike(text, event="storage/write")
    facts = {"fault": 0, "event": "storage/write", "file": FILE, "change": "x", "changed": True}
    run.record(1, 1, "operation", t=10.0, **facts, lasts_s=lasts_s)
    run.fail(rank=1, attempt=1, error=error, t=t, message=message, causes=causes)
    interrupt(run, steps=range(1, 6), exits={0: 1, 1: 1})
    finish(run)
    return run


TOLD = f"step 6 was not saved: rank 1: OSError: no space: '{FILE}'"


@pytest.mark.parametrize(
    ("t", "message", "expected"),
    [
        (11.0, TOLD, Verdict.RECOVERED),
        (9.0, TOLD, Verdict.UNRECOVERABLE),  # before the strike
        (11.0, "the data set is gone", Verdict.UNRECOVERABLE),  # of something else
    ],
)
@pytest.mark.parametrize("action", ["fail", "lose", "short"])
def test_an_altered_operation_explains_the_failure_that_tells_of_it_and_no_other(
    reference: Evidence, tmp_path: Path, action: str, t: float, message: str, expected: Verdict
) -> None:
    text = f"{action} rank=1 at=step:6/storage/write"
    judgement = failed(tmp_path, text, t=t, message=message).judged(reference, text)
    if expected is Verdict.UNRECOVERABLE and action != "fail":
        expected = Verdict.NOT_EXERCISED  # nobody came upon the lie
    assert judgement.verdict is expected, judgement.reason


@pytest.mark.parametrize(
    ("refusal", "error", "causes", "expected"),
    [
        ("EIO", "MyError", ("OSError",), Verdict.RECOVERED),
        ("EACCES", "MyError", ("PermissionError",), Verdict.RECOVERED),
        ("EIO", "MyError", ("PermissionError",), Verdict.UNRECOVERABLE),  # of another refusal
        ("EIO", "FileNotFoundError", (), Verdict.UNRECOVERABLE),
        ("EIO", "MyError", ("KeyError",), Verdict.UNRECOVERABLE),
    ],
)
def test_a_refusal_that_a_job_wraps_is_recognised_by_its_cause(
    reference: Evidence,
    tmp_path: Path,
    refusal: str,
    error: str,
    causes: tuple[str, ...],
    expected: Verdict,
) -> None:
    text = f"fail rank=1 at=step:6/storage/write error={refusal}"
    run = failed(tmp_path, text, t=11.0, message="cannot save", error=error, causes=causes)
    assert run.judged(reference, text).verdict is expected


@pytest.mark.parametrize(
    ("lasts_s", "expected"), [(60.0, Verdict.RECOVERED), (0.1, Verdict.UNRECOVERABLE)]
)
def test_a_delay_explains_an_attempt_that_ended_during_it_and_no_other(
    reference: Evidence, tmp_path: Path, lasts_s: float, expected: Verdict
) -> None:
    text = "delay rank=1 at=step:6/storage/write seconds=60"
    run = failed(tmp_path, text, t=11.0, lasts_s=lasts_s)
    assert run.judged(reference, text).verdict is expected


def test_what_was_read_wrongly_excuses_a_fallback_but_not_a_torn_store(
    reference: Evidence, make_run: MakeRun
) -> None:
    run = make_run(event="restore/shard/read", restored=2).run
    case = Case(
        reference=read_trajectory(reference.run),
        run=run,
        trajectory=read_trajectory(run),
        schedule=Schedule.parse(f"{KILL}; {CORRUPT}"),
        checkpoint_interval=2,
        expected_steps=range(1, 7),
    )
    assert case.damaged_in(2) == {4}
    assert not case.is_damaged(4, 2)
