"""Whole trials of a small job on real ranks: every kind of broken job is caught, a good one is not.

Also what a session shares and what it leaves behind.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from small_trials import experiment_of

from seatrial.chaos.errors import (
    ImpossibleFaultError,
    NondeterministicJobError,
    ReferenceFailedError,
)
from seatrial.chaos.experiment import Experiment
from seatrial.chaos.launch.plan import AttemptPlan
from seatrial.chaos.launch.processes import descendants
from seatrial.chaos.schedule import Schedule
from seatrial.chaos.session import Session, Trial
from seatrial.chaos.verdict import Verdict

KILL = "kill rank=1 at=step:5/backward"

TryJob = Callable[..., Trial]


def experiment(bug: str = "", **different: object) -> Experiment:
    """Eight steps of the tiny job, a checkpoint after every second one."""
    normal = experiment_of("tiny_job:TinyJob", {"bug": bug})
    return replace(normal, **different)  # type: ignore[arg-type]


@pytest.fixture
def try_job(session: Session) -> TryJob:
    """``try_job("kill …", "forgets the sampler")`` runs one trial of the job with that bug."""

    def run(schedule: str = KILL, bug: str = "", **different: object) -> Trial:
        return session.trial(experiment(bug, **different), Schedule.parse(schedule))

    return run


@pytest.mark.parametrize(
    "schedule",
    [
        "clean",
        KILL,
        "kill rank=0 at=step:5/data",
        "kill rank=* at=step:5/optimizer",
        "kill rank=1 at=step:1/data",
        "kill rank=0 at=step:4/checkpoint/manifest/link",
        "kill rank=0 at=step:4/checkpoint/manifest/link when=after",
        "kill rank=1 at=step:8/checkpoint/shard/write",
        "kill rank=1 at=exit",
        "exit rank=0 at=step:3/forward code=9",
        "raise rank=1 at=step:5/backward",
        "stop rank=1 at=step:5/backward resume=0.2",
        f"{KILL}; kill rank=0 at=restore/load",
        f"{KILL}; kill rank=0 at=restore attempt=2; kill rank=1 at=step:6 attempt=3",
        "kill rank=0 at=step:5/data nth=1; kill rank=1 at=step:7/data",
        f"tear rank=1 at=step:5/data; {KILL}",
        f"flip rank=1 at=step:5/data; {KILL}",
        f"remove rank=1 at=step:5/data part=objects; {KILL}",
        f"flip rank=1 at=step:5/data part=manifest; {KILL}",
        f"flip rank=1 at=step:5/data; flip rank=1 at=step:5/data part=objects; {KILL}",
        f"{KILL}; flip rank=1 at=restore/load attempt=2; kill rank=1 at=step:5/data attempt=2",
        f"corrupt rank=1 at=step:4/storage/write; {KILL}; kill rank=0 at=restore/quarantine",
        f"delay rank=0 at=step:5/data seconds=30; {KILL}",
    ],
)
def test_a_job_that_saves_everything_recovers(try_job: TryJob, schedule: str) -> None:
    trial = try_job(schedule)
    assert trial.verdict is Verdict.RECOVERED, trial.reason


def test_a_preempted_job_loses_no_step(try_job: TryJob) -> None:
    # At step 6: after the checkpoint of step 4 a rank that just died would lose step 5.
    trial = try_job("terminate rank=1 at=step:6/backward")
    assert (trial.verdict, trial.steps_lost) == (Verdict.RECOVERED, 0)
    assert trial.judgement.attempts == 2


def test_a_stopped_rank_hangs_the_attempt_and_the_restart_recovers(try_job: TryJob) -> None:
    trial = try_job("stop rank=1 at=step:5/backward")
    assert trial.verdict is Verdict.RECOVERED
    assert trial.run.attempts[0].ending == "hung"
    assert ", and no process ran for " in trial.run.attempts[0].cause


def test_a_run_that_takes_longer_than_it_may_is_ended(try_job: TryJob, session: Session) -> None:
    session.reference(experiment())  # may take longer, and is the same whatever a trial may
    trial = try_job("delay rank=0 at=step:5/data seconds=60", run_limit_s=2.0)
    assert trial.verdict is Verdict.HUNG
    assert "not over after 2 s, the most that a run may take (--chaos-run-limit)" in trial.reason


def test_steps_between_the_checkpoint_and_the_strike_are_lost(try_job: TryJob) -> None:
    trial = try_job("kill rank=1 at=step:6/backward")
    assert (trial.verdict, trial.steps_lost) == (Verdict.RECOVERED, 1)


@pytest.mark.parametrize(
    ("bug", "component", "says"),
    [
        ("forgets the scheduler", "scheduler", "scheduler of rank 0, an object of the job"),
        ("forgets the sampler", "sampler", "the samples of rank 0 differ"),
        ("forgets a random stream", "optimizer", "attempt 2, step 5"),
        ("forgets an average", "kept['average']", "its TrainingState does not hold"),
        ("forgets the scaler", "scaler", "its TrainingState does not hold"),
        ("asks the attempt", "optimizer", "it was equal right after the restore"),
    ],
)
def test_a_broken_job_diverges_in_the_first_step_after_the_restore_by_what_it_broke(
    try_job: TryJob, bug: str, component: str, says: str
) -> None:
    trial = try_job(KILL, bug)
    assert (trial.verdict, trial.judgement.step) == (Verdict.DIVERGED, 5)
    assert trial.judgement.component == component
    assert says in trial.reason


def test_what_was_compared_with_nothing_is_said(try_job: TryJob) -> None:
    trial = try_job(KILL, "forgets a sparse table")
    assert trial.verdict is Verdict.RECOVERED
    (note,) = trial.judgement.notes
    assert note == (
        "table/rows, outside the TrainingState, was not compared with the reference: it is a "
        "torch.sparse_coo tensor of torch.float32"
    )


@pytest.mark.parametrize("bug", ["forgets the scheduler", "forgets the sampler"])
def test_a_broken_job_that_is_not_interrupted_shows_nothing(try_job: TryJob, bug: str) -> None:
    assert try_job("clean", bug).verdict is Verdict.RECOVERED


def test_weights_of_each_rank_under_one_name_are_refused_at_the_first_save(
    try_job: TryJob,
) -> None:
    says = r"step 2 was not saved: the copies of .*model/3\.weight.* on ranks 0, 1 differ"
    with pytest.raises(ReferenceFailedError, match=says):
        try_job("clean", "own parameters")


@pytest.mark.parametrize("action", ["wrong-reduction", "wrong-dtype"])
def test_a_collective_that_was_made_otherwise_is_found_before_its_step_counts(
    try_job: TryJob, action: str
) -> None:
    trial = try_job(f"{action} rank=1 at=step:5/collective/all_reduce")
    assert trial.verdict is Verdict.RECOVERED
    assert "CollectiveMismatchError: step 5: " in trial.run.attempts[0].cause
    assert trial.steps_lost == 0


def test_a_corrupted_gradient_keeps_the_checkpoint_from_being_published(try_job: TryJob) -> None:
    trial = try_job("garble rank=1 at=step:5/backward")
    assert trial.verdict is Verdict.RECOVERED
    assert "ReplicaMismatchError: step 6 was not saved" in trial.run.attempts[0].cause
    assert trial.run.attempts[0].store.valid == (2, 4)
    assert trial.steps_lost == 2  # both of which were wrong


def test_a_gradient_that_was_wrong_before_it_was_reduced_goes_unnoticed(try_job: TryJob) -> None:
    trial = try_job("garble rank=1 at=step:5/backward of=input")
    assert trial.verdict is Verdict.CORRUPTION_UNDETECTED
    assert "published the checkpoint of step 6" in trial.reason


def test_a_call_that_nobody_makes_hangs_the_attempt_and_the_rank_is_named(try_job: TryJob) -> None:
    trial = try_job("drop rank=1 at=step:5/optimizer", timeout_s=2.0)
    assert trial.verdict is Verdict.RECOVERED
    assert trial.run.attempts[0].ending == "hung"
    assert "rank 1 did not come to all_reduce #" in trial.run.attempts[0].cause


def test_a_swap_of_calls_that_are_waited_for_is_not_exercised(try_job: TryJob) -> None:
    trial = try_job("reorder rank=1 at=step:5/collective/all_reduce")
    assert trial.verdict is Verdict.NOT_EXERCISED
    assert "it was waited for before another call came" in trial.reason


def test_a_swallowed_exception_is_not_exercised(try_job: TryJob) -> None:
    trial = try_job("raise rank=1 at=step:5/data", "swallows exceptions")
    assert trial.verdict is Verdict.NOT_EXERCISED
    assert "changed nothing" in trial.reason


def test_a_fault_that_waits_for_an_event_too_often_is_not_exercised(try_job: TryJob) -> None:
    trial = try_job("kill rank=1 at=step:5/backward nth=2")
    assert trial.verdict is Verdict.NOT_EXERCISED
    assert "never fired" in trial.reason


@pytest.mark.parametrize("bug", ["leaks a process", "leaks a file"])
def test_a_job_that_leaves_something_behind_is_leaked(try_job: TryJob, bug: str) -> None:
    assert try_job(KILL, bug).verdict is Verdict.LEAKED


def test_a_fault_in_every_attempt_stops_the_job_with_its_checkpoint(try_job: TryJob) -> None:
    trial = try_job(f"{KILL} persistent=yes", max_restarts=1)
    assert trial.verdict is Verdict.STOPPED
    assert trial.judgement.attempts == 2
    assert "the checkpoint of step 4 is valid" in trial.reason


def test_damage_to_every_checkpoint_is_unrecoverable(try_job: TryJob) -> None:
    trial = try_job("tear rank=1 at=step:3/data; kill rank=1 at=step:3/backward", max_restarts=1)
    assert trial.verdict is Verdict.UNRECOVERABLE


def test_a_job_that_depends_on_time_is_refused_by_component_and_step(try_job: TryJob) -> None:
    with pytest.raises(NondeterministicJobError) as caught:
        try_job(KILL, "depends on time")
    message = str(caught.value)
    assert "first in optimizer" in message
    assert "step 1" in message
    assert "Usual causes: an RNG that is not seeded" in message
    assert "\n" not in message


def test_a_job_that_draws_from_an_unseeded_stream_is_refused_by_component(
    try_job: TryJob,
) -> None:
    with pytest.raises(NondeterministicJobError, match="first in rng, attempt 1, step 1"):
        try_job(KILL, "depends on the process")


def test_a_job_that_consumes_a_sample_twice_is_not_called_nondeterministic(
    try_job: TryJob,
) -> None:
    with pytest.raises(ReferenceFailedError, match=r"epoch 0: sample \d+ is consumed \d+ times"):
        try_job(KILL, "consumes samples twice")


def test_a_job_that_crashes_by_itself_is_refused_with_its_last_words(try_job: TryJob) -> None:
    with pytest.raises(ReferenceFailedError) as caught:
        try_job(KILL, "crashes")
    sentence = str(caught.value).splitlines()[0]
    assert "does not finish even when nothing is done to it" in sentence
    assert "RuntimeError: the data set is not where it was" in sentence


def test_a_job_that_records_nothing_is_refused(session: Session) -> None:
    silent = experiment_of("", {}, entry="tiny_job:records_nothing")
    with pytest.raises(ReferenceFailedError):
        session.trial(silent, Schedule())


def test_a_refusal_is_remembered_and_nothing_runs_again(try_job: TryJob, session: Session) -> None:
    messages = []
    for _ in range(2):
        with pytest.raises(ReferenceFailedError) as caught:
            try_job(KILL, "crashes")
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_a_fault_that_can_never_fire_is_refused_before_anything_runs(tmp_path: Path) -> None:
    before = set(descendants(os.getpid()))
    session = Session(tmp_path / "root", owner="test")
    with pytest.raises(ImpossibleFaultError):
        session.trial(experiment(), Schedule.parse("kill rank=7 at=data"))
    assert set(descendants(os.getpid())) <= before
    session.close()
    assert not list((tmp_path / "root").glob("[!.]*"))


@pytest.mark.parametrize(
    "component", ["model", "optimizer", "scheduler", "rng", "sampler", "progress"]
)
def test_a_restore_that_leaves_a_component_out_is_caught_by_name(
    session: Session, component: str
) -> None:
    subject = experiment()
    more = {"omit": component, "stop_after": 1}
    crippled = replace(subject.workload, arguments=subject.workload.arguments | more)
    trial = session.control(subject, crippled, steps=1)
    assert (trial.verdict, trial.judgement.component) == (Verdict.DIVERGED, component)


def test_a_control_that_leaves_nothing_out_recovers(session: Session) -> None:
    subject = experiment()
    arguments = subject.workload.arguments | {"stop_after": 1}
    trial = session.control(subject, replace(subject.workload, arguments=arguments), steps=1)
    assert trial.verdict is Verdict.RECOVERED, trial.reason


def test_a_trial_can_be_kept_with_its_evidence(
    try_job: TryJob, session: Session, tmp_path: Path
) -> None:
    session.keep(try_job(KILL), tmp_path / "kept")
    kept = tmp_path / "kept"
    names = {str(path.relative_to(kept)) for path in kept.rglob("*")}
    assert {"traces/attempt1-rank1.jsonl", "strikes/fault0-rank1.json", "run.json"} <= names
    assert {"attempt1/rank0.log", "attempt2/rank1.log"} <= names


def test_the_reference_is_computed_once_for_all_sessions_that_share_a_directory(
    session: Session, try_job: TryJob
) -> None:
    trial = try_job(KILL)
    name = f"reference-{experiment().key}"
    root = next(path for path in trial.run.directory.parents if (path / name).exists())
    written = (root / name / "first" / "run.json").stat().st_mtime_ns
    other = Session(root, owner="other")
    reference = other.reference(experiment())
    other.close()
    assert (root / name / "first" / "run.json").stat().st_mtime_ns == written
    assert reference.run == session.reference(experiment()).run


def test_a_closed_session_leaves_no_process_and_nothing_of_its_own(tmp_path: Path) -> None:
    stores = tmp_path / "stores"
    root = tmp_path / "root"
    session = Session(root, owner="test", stores=stores)
    before = set(descendants(os.getpid()))
    trial = session.trial(experiment(), Schedule.parse(KILL))
    assert trial.verdict is Verdict.RECOVERED
    run = session.reference(experiment()).run
    plan = AttemptPlan.from_json((run.directory / "attempt1" / "plan.json").read_text())
    assert stores in Path(plan.store).parents, "its pace is that of another place"
    session.close()
    assert set(descendants(os.getpid())) <= before
    assert not (root / "test").exists()
    assert not list(stores.glob("*"))
    shutil.rmtree(root)
