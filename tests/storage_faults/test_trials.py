"""Trials of the tiny job with faults in single storage operations, and their verdicts.

In each the job either recovers, or stops with an error that names rank, file and cause, or the
verdict says what it lost. A fault that could not strike, or of which nothing was seen, proves
nothing."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
from object_servers import BUCKET, moto
from small_trials import experiment_of

from seatrial.chaos.errors import ImpossibleFaultError
from seatrial.chaos.schedule import Schedule
from seatrial.chaos.session import Session, Trial
from seatrial.chaos.verdict import Verdict

KILL = "kill rank=1 at=step:5/backward"
SHARD = "path=*.safetensors nth=2"  # the first write is that of the header

TryJob = Callable[..., Trial]


@pytest.fixture(scope="module")
def try_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TryJob]:
    """``try_job("fail …")`` runs one trial: six steps, a checkpoint after each second one."""
    session = Session(tmp_path_factory.mktemp("session"), owner="test")

    yield partial(run_trial, session)
    session.close()


def run_trial(
    session: Session, schedule: str, job: str = "tiny_job:TinyJob", **more: float
) -> Trial:
    experiment = replace(experiment_of(job, {}, steps=6), **more)  # type: ignore[arg-type]
    return session.trial(experiment, Schedule.parse(schedule))


@pytest.fixture(scope="module")
def try_job_on_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TryJob]:
    """The same, with its checkpoints on moto."""
    with moto() as server, pytest.MonkeyPatch.context() as patched:
        for name, value in server.environment.items():
            patched.setenv(name, value)
        prefix = secrets.token_hex(8)
        url = f"s3://{BUCKET}/{prefix}"
        session = Session(tmp_path_factory.mktemp("session"), owner="test", stores=url)
        yield partial(run_trial, session, object_store=True)
        session.close()
        assert "Contents" not in server.client().list_objects_v2(Bucket=BUCKET, Prefix=prefix)


def causes(trial: Trial) -> list[str]:
    return [attempt.cause for attempt in trial.run.attempts]


@pytest.mark.parametrize(
    "schedule",
    [
        f"fail rank=1 at=storage/read error=EIO attempt=2; {KILL}",
        f"corrupt rank=1 at=storage/read path=*.safetensors attempt=2; {KILL}",
        f"corrupt rank=1 at=step:4/storage/write {SHARD}; {KILL}",
        f"corrupt rank=0 at=step:4/storage/write path=*manifest.json*; {KILL}",
        f"lose rank=0 at=step:4/storage/publish; {KILL}",
        f"stale rank=1 at=storage/read path=*/manifest.json attempt=2; {KILL}",
        f"kill rank=1 at=step:4/storage/write {SHARD}",
        f"swap rank=1 at=step:5/data; {KILL}",
        f"rollback rank=1 at=step:5/data; {KILL}",
        f"delay rank=1 at=storage/sync seconds=0.05 times=3; {KILL}",
    ],
)
def test_the_run_recovers(try_job: TryJob, schedule: str) -> None:
    trial = try_job(schedule)
    assert trial.verdict is Verdict.RECOVERED, trial.reason


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("fail rank=1 at=step:4/storage/write error=ENOSPC", "No space left on device (injected"),
        ("fail rank=1 at=step:4/storage/sync error=EIO", "Input/output error (injected"),
        (f"lose rank=1 at=step:4/storage/write {SHARD}", "bytes instead of"),
        (f"short rank=1 at=step:4/storage/write {SHARD} keep=5", "bytes instead of"),
        (f"late rank=1 at=step:4/storage/write {SHARD} hold=9", "bytes instead of"),
    ],
)
def test_the_save_stops_naming_rank_file_and_cause_and_the_restart_recovers(
    try_job: TryJob, fault: str, says: str
) -> None:
    trial = try_job(fault)
    assert trial.verdict is Verdict.RECOVERED, trial.reason
    assert trial.judgement.attempts == 2
    cause = causes(trial)[0]
    assert "step 4 was not saved: rank 1: OSError" in cause
    assert "rank-00001" in cause
    assert says in cause


def test_a_store_that_stalls_for_longer_than_the_deadline_ends_the_attempt_only(
    try_job: TryJob,
) -> None:
    trial = try_job("delay rank=1 at=step:4/storage/write seconds=600", timeout_s=3)
    assert trial.verdict is Verdict.RECOVERED, trial.reason
    assert [attempt.ending for attempt in trial.run.attempts] == ["hung", "completed"]


def test_a_fault_that_does_not_go_away_stops_the_job_with_the_previous_checkpoint(
    try_job: TryJob,
) -> None:
    trial = try_job(
        "fail rank=1 at=step:6/storage/write error=EDQUOT times=always persistent=yes",
        max_restarts=1,
    )
    assert trial.verdict is Verdict.STOPPED, trial.reason
    assert "the checkpoint of step 4 is valid" in trial.reason
    assert all("Disk quota exceeded" in cause for cause in causes(trial))


def test_a_listing_that_lags_loses_work(try_job: TryJob) -> None:
    """The protocol relies on listings, and the verdict says what that costs."""
    trial = try_job(f"stale rank=0 at=storage/list attempt=2; {KILL}")
    assert trial.verdict is Verdict.LOST_WORK, trial.reason


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        ("fail rank=1 at=storage/commit", "stores in a way that is not observed"),
        (f"short rank=1 at=step:4/storage/write keep=99999; {KILL}", "bytes written"),
        (f"corrupt rank=0 at=step:4/storage/publish; {KILL}", "no bytes pass"),
        (f"corrupt rank=1 at=step:4/storage/write {SHARD}", "neither did a restore meet"),
    ],
)
def test_a_fault_that_proved_nothing_is_not_exercised(
    try_job: TryJob, schedule: str, says: str
) -> None:
    trial = try_job(schedule)
    assert trial.verdict is Verdict.NOT_EXERCISED
    assert says in trial.reason


@pytest.mark.parametrize(
    "schedule",
    [
        (
            "fail rank=1 at=step:4/storage/write error=SlowDown times=2 path=*.safetensors; "
            "fail rank=0 at=step:4/storage/publish when=after error=ECONNRESET; "
            f"fail rank=1 at=storage/read error=ETIMEDOUT attempt=2; {KILL}"
        ),
        "lose rank=1 at=step:4/storage/write path=*.safetensors",
    ],
)
def test_the_run_recovers_on_an_object_store(try_job_on_s3: TryJob, schedule: str) -> None:
    trial = try_job_on_s3(schedule)
    assert trial.verdict is Verdict.RECOVERED, trial.reason
    if schedule.startswith("lose"):
        assert "rank-00001.safetensors is not there" in causes(trial)[0]


SIDE = "side_file_job:SideFileJob"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("fail rank=1 at=step:3/storage/commit path=*/side-1 error=ENOSPC", "No space left"),
        ("short rank=1 at=step:3/storage/write path=*/side-1 keep=0", "does not hold what was"),
        ("lose rank=1 at=step:3/storage/commit path=*/side-1", "No such file"),
    ],
)
def test_what_a_job_writes_by_itself_through_chaos_is_struck_too(
    try_job: TryJob, fault: str, says: str
) -> None:
    trial = try_job(fault, job=SIDE)
    assert trial.verdict is Verdict.RECOVERED, trial.reason
    assert says in causes(trial)[0]
    assert "side-1" in causes(trial)[0]


def test_what_can_never_strike_is_refused(try_job: TryJob) -> None:
    with pytest.raises(ImpossibleFaultError, match="the run ends at step 6"):
        try_job("fail rank=1 at=step:7/storage/write")
