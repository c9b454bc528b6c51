"""Verifies trials that restart on another topology: a job that may recovers, judged bitwise by the
hand-off oracle; what a restore elsewhere leaves out is found, by name; and nothing passes that did
not restore anything there.

Kinds of parallelism are the bundled job's: see tests/jobs/test_resharding.py and ci/suite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from seatrial.chaos.errors import ReferenceFailedError
from seatrial.chaos.experiment import Experiment
from seatrial.chaos.handover import Handover
from seatrial.chaos.launch.plan import Workload, World
from seatrial.chaos.schedule import Schedule
from seatrial.chaos.session import Session, Trial
from seatrial.chaos.verdict import Verdict

KILL = "kill rank=1 at=step:6/backward"


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    shared = Session(tmp_path_factory.mktemp("session"), owner="test")
    yield shared
    shared.close()


@pytest.fixture
def reshard(session: Session) -> Callable[..., Trial]:
    """``reshard("dp4", KILL, bug)``: a trial on two ranks whose restarts are on that topology."""

    def run(target: str, schedule: str = KILL, bug: str = "") -> Trial:
        arguments = {"job": "resharding_job:ReshardingJob", "params": {"bug": bug}}
        workload = Workload(
            entry="seatrial.plugins.jobs.loop:run",
            arguments=arguments | {"steps": 8, "interval": 2},
            preload=("seatrial.plugins.jobs.loop", "resharding_job"),
        )
        experiment = Experiment(
            workload=workload,
            world=World(ranks=2, topology="dp2", device="cpu"),
            seed=0,
            steps=8,
            checkpoint_interval=2,
        )

        def giving(directory: Path, step: int) -> Workload:
            more = {"hand_off": str(directory), "stop_after": step}
            return replace(workload, arguments=workload.arguments | more)

        def taking(directory: Path) -> Workload:
            more = {"take_over": str(directory)}
            return replace(workload, arguments=workload.arguments | more)

        world = World(ranks=int(target[2:]), topology=target, device="cpu")
        handover = Handover(world=world, giving=giving, taking=taking)
        return session.reshard(experiment, Schedule.parse(schedule), handover)

    return run


@pytest.mark.parametrize("target", ["dp1", "dp2", "dp4"])
def test_a_job_that_may_change_its_ranks_recovers(
    reshard: Callable[..., Trial], target: str
) -> None:
    trial = reshard(target)
    assert trial.verdict is Verdict.RECOVERED, trial.reason
    assert [attempt.ranks for attempt in trial.run.attempts] == [2, int(target[2:])]
    assert trial.steps_lost == 1


def test_random_streams_without_a_counterpart_are_reported(reshard: Callable[..., Trial]) -> None:
    notes = " ".join(reshard("dp4").judgement.notes)
    assert "rank 3: the checkpoint of step 4 holds no RNG state for python, numpy, torch" in notes
    assert "rank 1:" not in notes


def test_a_second_restart_is_on_the_other_topology_too(reshard: Callable[..., Trial]) -> None:
    trial = reshard("dp4", f"{KILL}; kill rank=0 at=step:7/data attempt=2")
    assert trial.verdict is Verdict.RECOVERED, trial.reason
    assert [attempt.ranks for attempt in trial.run.attempts] == [2, 4, 4]


@pytest.mark.parametrize("target", ["dp1", "dp4"])
def test_what_a_restore_elsewhere_leaves_out_is_called_by_name(
    reshard: Callable[..., Trial], target: str
) -> None:
    trial = reshard(target, bug="forgets the sampler elsewhere")
    assert trial.verdict is Verdict.DIVERGED
    assert trial.judgement.component == "sampler"
    assert f"right after the restore of step 4 onto {target}: sampler differs" in trial.reason


def test_a_component_that_its_own_code_loses_elsewhere_is_found(
    reshard: Callable[..., Trial],
) -> None:
    # The oracle loses it too; the state that was saved does not.
    trial = reshard("dp4", bug="has a budget")
    assert trial.verdict is Verdict.DIVERGED
    assert trial.judgement.component == "budget"


@pytest.mark.parametrize("schedule", ["clean", "kill rank=1 at=step:1/data"])
def test_a_trial_that_restores_nothing_elsewhere_never_passes(
    reshard: Callable[..., Trial], schedule: str
) -> None:
    trial = reshard("dp4", schedule)
    assert trial.verdict is Verdict.NOT_EXERCISED
    assert "no checkpoint was restored onto dp4" in trial.reason


def test_a_state_that_cannot_be_handed_over_is_refused_in_a_sentence(
    reshard: Callable[..., Trial],
) -> None:
    with pytest.raises(ReferenceFailedError, match="and this job has the RNG stream noise"):
        reshard("dp4", bug="has a stream of its own")
