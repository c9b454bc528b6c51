"""Verifies that state which is easily forgotten comes back, and that a job which forgets a piece of
it is told which: frozen parameters, parameters without a gradient, several optimizers and chained
schedulers, skipped steps, gradients between two updates, buffers, averages, the ends of an epoch.

One job has all of it (tests/programs/traits_job.py); its runs are killed where a piece matters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from small_trials import experiment_of, handover_of

from seatrial.chaos.experiment import Experiment
from seatrial.chaos.schedule import Schedule
from seatrial.chaos.session import Session, Trial
from seatrial.chaos.trajectory import read_trajectory
from seatrial.chaos.verdict import Verdict


def experiment(interval: int, **params: object) -> Experiment:
    return experiment_of("traits_job:TraitsJob", params, interval=interval)


@pytest.fixture
def resume_with(session: Session) -> Callable[..., Trial]:
    """``resume_with(bug=…)`` takes the reference's checkpoint of step 6 and goes on for a step."""

    def run(**params: object) -> Trial:
        subject = experiment(3)
        arguments = {**subject.workload.arguments, "params": params, "stop_after": 1}
        return session.control(subject, replace(subject.workload, arguments=arguments), steps=1)

    return run


# An epoch has 3 steps, the last one uneven: with an interval of 3 a checkpoint is its very end,
# with 2 the last batch comes right after one.
@pytest.mark.parametrize(
    ("interval", "schedule", "restored"),
    [
        pytest.param(3, "kill rank=1 at=step:5/backward nth=2", [3], id="between micro-steps"),
        pytest.param(3, "kill rank=0 at=step:3/optimizer", [None], id="while a step is skipped"),
        pytest.param(3, "kill rank=1 at=step:7/data", [6], id="with a gradient carried over"),
        pytest.param(
            3,
            "kill rank=1 at=step:5/data; kill rank=0 at=step:5/data attempt=2",
            [3, 3],
            id="twice in a row",
        ),
        pytest.param(3, "kill rank=1 at=exit", [8], id="after the final step"),
        pytest.param(2, "kill rank=1 at=step:3/data", [2], id="before the last batch"),
        pytest.param(2, "kill rank=0 at=step:5/forward", [4], id="when a layer has been frozen"),
    ],
)
def test_a_job_with_every_trap_recovers(
    session: Session, interval: int, schedule: str, restored: list[int | None]
) -> None:
    trial = session.trial(experiment(interval), Schedule.parse(schedule))
    assert trial.verdict is Verdict.RECOVERED, trial.reason
    beginnings = read_trajectory(trial.run).beginnings
    assert [each.restored for each in beginnings] == [None, *restored]


def test_a_job_with_every_trap_may_change_its_ranks_and_change_them_back(session: Session) -> None:
    subject = experiment(2)
    schedule = "kill rank=1 at=step:5/backward nth=2; kill rank=0 at=step:7/forward attempt=2"
    trial = session.reshard(subject, Schedule.parse(schedule), handover_of(subject, "dp1:dp2"))
    assert trial.verdict is Verdict.RECOVERED, trial.reason
    assert [attempt.ranks for attempt in trial.run.attempts] == [2, 1, 2]


@pytest.mark.parametrize(
    ("forget", "component", "says"),
    [
        ("model/early", "model", "model/early.weight differs"),
        ("model/norm.running_mean", "model", "model/norm.running_mean differs"),
        ("model/norm.num_batches", "model", "model/norm.num_batches_tracked differs"),
        ("optimizer/body/early.weight/exp_avg", "optimizer", "optimizer/body/early.weight/exp_avg"),
        ("optimizer/body/norm.bias/step", "optimizer", "optimizer/body/norm.bias/step differs"),
        ("optimizer/head", "optimizer", "optimizer/head/head.weight/momentum_buffer differs"),
        ("scheduler/body", "scheduler", "scheduler/body differs"),
        ("scheduler/head", "scheduler", "scheduler/head differs"),
        ("scheduler/offset", "scheduler", "scheduler/offset differs"),
        ("scaler", "scaler", "scaler differs"),
        ("average/module.head", "average", "average/module.head.weight differs"),
        ("average/module.norm", "average", "average/module.norm."),
        ("average/n_averaged", "average", "average/n_averaged differs"),
        ("carried", "carried", "carried differs"),
        ("sampler", "sampler", "sampler differs"),
    ],
)
def test_a_piece_that_a_restore_forgets_is_named_right_after_it(
    resume_with: Callable[..., Trial], forget: str, component: str, says: str
) -> None:
    trial = resume_with(forget=forget)
    assert (trial.verdict, trial.judgement.component) == (Verdict.DIVERGED, component), trial.reason
    assert "right after the restore of step 6" in trial.reason
    assert says in trial.reason


def test_frozen_parameters_come_from_the_checkpoint_too(
    resume_with: Callable[..., Trial],
) -> None:
    assert resume_with(bug="builds anew").verdict is Verdict.RECOVERED
    trial = resume_with(bug="builds anew", forget="model/frozen.weight")
    assert trial.verdict is Verdict.DIVERGED
    assert "right after the restore of step 6: model/frozen.weight differs" in trial.reason


@pytest.mark.parametrize(
    ("bug", "says"),
    [
        ("freezes once", "step 7: average/module.early.weight differs"),
        ("touches the spare", "step 7: optimizer/body/spare.weight/step is not in the reference"),
    ],
)
def test_what_a_resumed_job_does_otherwise_is_found_in_its_first_step(
    resume_with: Callable[..., Trial], bug: str, says: str
) -> None:
    trial = resume_with(bug=bug)
    assert trial.verdict is Verdict.DIVERGED
    assert says in trial.reason


def test_statistics_that_each_rank_keeps_for_itself_are_named_as_such(session: Session) -> None:
    subject = experiment(3, bug="keeps statistics of its own")
    trial = session.trial(subject, Schedule.parse("kill rank=1 at=step:4/data"))
    assert trial.verdict is Verdict.DIVERGED
    assert "norm.running_mean is not the same on all ranks of the reference" in trial.reason
    assert "settle_buffers" in trial.reason


def test_the_job_has_the_traps(session: Session) -> None:
    steps = {step.number: step for step in session.reference(experiment(3)).trajectory.steps}
    scales = [steps[number].outputs[0]["loss scale"] for number in steps]
    assert scales == [1024.0, 1024.0, 512.0, 512.0, 512.0, 512.0, 1024.0, 1024.0]
    model = {number: step.state["model"] for number, step in steps.items()}
    assert model[1]["model/early.weight"] != model[2]["model/early.weight"]
    assert model[2]["model/early.weight"] == model[8]["model/early.weight"]
    assert model[6]["model/head.weight"] != model[7]["model/head.weight"]
    moments = {name for name in steps[8].state["optimizer"] if name.endswith("/exp_avg")}
    assert not [name for name in moments if "spare" in name or "frozen" in name]
    assert steps[5].state["carried"] != steps[6].state["carried"]
    assert [len(each["samples"][1]) for each in steps[3].outputs] == [5, 4]
    assert [steps[number].outputs[0]["samples"][0] for number in (3, 4)] == [0, 1]
