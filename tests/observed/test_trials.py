"""Trials of jobs that save by `torch.save` or safetensors themselves, on a disk that lies.

A job whose checkpoints are silently corrupt must never be said to recover; one that checks them
does. A fault that could not strike is not exercised, and the reason names what was not observed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from small_trials import experiment_of

from seatrial.chaos.errors import UsageError
from seatrial.chaos.powerloss import check_kind
from seatrial.chaos.schedule import Schedule
from seatrial.chaos.session import Session, Trial
from seatrial.chaos.verdict import Verdict

KILL = "kill rank=1 at=step:5/backward"
WRITE = "corrupt rank=1 at=step:4/storage/write nth=2"
TORCH, SAFETENSORS = "native_jobs:TorchSaveJob", "native_jobs:SafetensorsJob"
OURS = "tiny_job:TinyJob"

TryJob = Callable[..., Trial]


@pytest.fixture(scope="module")
def try_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TryJob]:
    """``try_job("fail …")`` runs one trial: six steps, a checkpoint after each second one."""
    try:
        check_kind("fuse", "--chaos-disk")
    except UsageError as error:
        pytest.skip(str(error))
    session = Session(tmp_path_factory.mktemp("session"), owner="test", disk="fuse")

    def run(
        schedule: str, job: str = TORCH, timeout_s: float | None = None, **params: str
    ) -> Trial:
        experiment = replace(experiment_of(job, dict(params), steps=6), max_restarts=2)
        return session.trial(replace(experiment, timeout_s=timeout_s), Schedule.parse(schedule))

    yield run
    session.close()


READ = f"fail rank=1 at=storage/read path=*/rank-1 attempt=2; {KILL}"


@pytest.mark.parametrize(
    ("job", "fault"),
    [
        (TORCH, "fail rank=1 at=step:4/storage/write error=ENOSPC"),
        (TORCH, "fail rank=1 at=step:4/storage/commit error=EDQUOT"),
        (TORCH, "kill rank=1 at=step:4/storage/write"),
        (TORCH, READ),
        (SAFETENSORS, "fail rank=1 at=step:4/storage/write error=ENOSPC"),
        (SAFETENSORS, "fail rank=1 at=step:4/storage/rename error=EROFS"),
        (SAFETENSORS, READ),
    ],
)
def test_what_the_job_is_told_of_ends_an_attempt_and_the_restart_recovers(
    try_job: TryJob, job: str, fault: str
) -> None:
    trial = try_job(fault, job)
    assert trial.verdict is Verdict.RECOVERED, trial.reason
    assert trial.judgement.attempts == 2 + (KILL in fault)


@pytest.mark.parametrize(
    ("job", "fault"),
    [
        (TORCH, WRITE),
        (TORCH, "seed=4; corrupt rank=1 at=storage/read path=*/rank-1 attempt=2"),
        (SAFETENSORS, "corrupt rank=1 at=step:4/storage/commit path=*/.rank-1.tmp"),
        (SAFETENSORS, "corrupt rank=1 at=storage/read path=*/rank-1 attempt=2 nth=2"),
    ],
)
def test_a_job_that_restores_wrong_bytes_is_found_out(
    try_job: TryJob, job: str, fault: str
) -> None:
    trial = try_job(f"{fault}; {KILL}", job)
    assert trial.verdict is Verdict.CORRUPTION_UNDETECTED, trial.reason
    assert "rank 1 read" in trial.reason
    assert "/ckpt-4/rank-1" in trial.reason
    assert trial.judgement.component


def test_a_job_that_checks_falls_back_and_recovers(try_job: TryJob) -> None:
    """The fault is the same that another job restores."""
    trial = try_job(f"{WRITE}; {KILL}", mode="checks")
    assert (trial.verdict, trial.steps_lost) == (Verdict.RECOVERED, 2), trial.reason


@pytest.mark.parametrize(
    ("job", "fault", "verdict"),
    [
        (TORCH, "short rank=1 at=step:4/storage/write keep=5", Verdict.UNRECOVERABLE),
        (SAFETENSORS, "lose rank=1 at=step:4/storage/write path=*/.tmp*", Verdict.UNRECOVERABLE),
        (TORCH, "lose rank=1 at=step:4/storage/rename", Verdict.LOST_WORK),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_not_recovered_from(
    try_job: TryJob, job: str, fault: str, verdict: Verdict
) -> None:
    trial = try_job(f"{fault}; {KILL}", job)
    assert trial.verdict is verdict, trial.reason


def test_a_disk_that_stays_full_stops_the_job(try_job: TryJob) -> None:
    trial = try_job("fail rank=1 at=step:6/storage/write error=ENOSPC times=always persistent=yes")
    assert trial.verdict is Verdict.STOPPED, trial.reason
    assert "the checkpoint of step 4 is valid" in trial.reason


def test_a_rank_that_stalls_on_its_disk_can_be_ended(try_job: TryJob) -> None:
    trial = try_job("delay rank=1 at=step:4/storage/write seconds=600", timeout_s=1.5)
    assert trial.verdict is Verdict.RECOVERED, trial.reason
    assert [attempt.ending for attempt in trial.run.attempts] == ["hung", "completed"]


@pytest.mark.parametrize("fault", ["stop rank=1 at=step:4/storage/write resume=0.3",
                                   "slow rank=1 at=step:4/storage/write rate=200000"])  # fmt: skip
def test_what_only_takes_longer_changes_nothing(try_job: TryJob, fault: str) -> None:
    trial = try_job(fault)
    assert trial.verdict is Verdict.RECOVERED, trial.reason
    assert trial.judgement.attempts == 1


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (f"corrupt rank=1 at=storage/read path=*/rank-1 attempt=2; {KILL}", "the state is right"),
        ("raise rank=1 at=step:4/storage/write", "use fail or kill"),
        ("fail rank=1 at=step:4/storage/publish", "everything that it did on the disk"),
    ],
)
def test_a_fault_that_proved_nothing_is_not_exercised(
    try_job: TryJob, fault: str, says: str
) -> None:
    trial = try_job(fault)
    assert trial.verdict is Verdict.NOT_EXERCISED
    assert says in trial.reason


def test_what_is_written_beside_the_disk_is_named(try_job: TryJob, tmp_path: Path) -> None:
    trial = try_job("fail rank=1 at=step:4/storage/write", mode="elsewhere", place=str(tmp_path))
    assert trial.verdict is Verdict.NOT_EXERCISED
    assert f"rank 1 wrote {tmp_path}" in trial.reason
    assert "no fault of the storage can strike" in " ".join(trial.judgement.notes)


def test_a_job_with_a_directory_of_its_own_can_be_sent_to_the_disk(try_job: TryJob) -> None:
    fault = "fail rank=1 at=step:4/storage/write error=ENOSPC"
    trial = try_job(fault, mode="elsewhere", place="{store}/mine")
    assert (trial.verdict, trial.judgement.notes) == (Verdict.RECOVERED, ()), trial.reason
    assert trial.judgement.attempts == 2


@pytest.mark.parametrize(
    ("fault", "lost"),
    [
        ("fail rank=1 at=step:4/storage/sync error=EIO", 2),
        # Every reading of that step: which file a rank fetches first, and which part of it another
        # has fetched already, is the kernel's choice, and a header's padding harms nobody.
        (f"corrupt rank=1 at=storage/read path=*step-00000004* attempt=2 times=always; {KILL}", 2),
        (f"corrupt rank=1 at=step:4/storage/write path=*.safetensors nth=2; {KILL}", 2),
        ("raise rank=1 at=step:4/storage/write", 2),
    ],
)
def test_this_projects_store_recovers_there_too(try_job: TryJob, fault: str, lost: int) -> None:
    trial = try_job(fault, OURS)
    assert (trial.verdict, trial.steps_lost) == (Verdict.RECOVERED, lost), trial.reason
