"""Verifies trials that restart on another topology: a job that may recovers, judged bitwise by the
hand-off oracle; what a restore elsewhere leaves out is found, by name; and nothing passes that did
not restore anything there.

So may a run that changes its topology several times, and falls back or is struck on the way.

Kinds of parallelism are the bundled job's: see tests/jobs/test_resharding.py and ci/suite.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from small_trials import experiment_of, handover_of

from seatrial.chaos.errors import ImpossibleFaultError
from seatrial.chaos.schedule import Schedule
from seatrial.chaos.session import Session, Trial
from seatrial.chaos.trajectory import read_trajectory
from seatrial.chaos.verdict import Verdict

KILL = "kill rank=1 at=step:6/backward"


@pytest.fixture
def reshard(session: Session) -> Callable[..., Trial]:
    """``reshard("dp4", KILL, bug)``: a trial on two ranks whose restarts are on that topology.

    ``dp4:dp2`` is one restart on each.
    """

    def run(target: str, schedule: str = KILL, bug: str = "", tail: str = "partial") -> Trial:
        experiment = experiment_of("resharding_job:ReshardingJob", {"bug": bug, "tail": tail})
        handover = handover_of(experiment, target)
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


@pytest.mark.parametrize(
    "schedule",
    [
        "clean",
        "kill rank=1 at=step:1/data",
        # Restores there what was saved there, by a run that started anew.
        "kill rank=1 at=step:1/data; kill rank=1 at=step:5/data attempt=2",
    ],
)
def test_a_trial_that_restores_nothing_elsewhere_never_passes(
    reshard: Callable[..., Trial], schedule: str
) -> None:
    trial = reshard("dp4", schedule)
    assert trial.verdict is Verdict.NOT_EXERCISED
    assert "no checkpoint was restored onto dp4" in trial.reason


def test_a_stream_of_the_job_s_own_goes_on_or_is_derived(reshard: Callable[..., Trial]) -> None:
    trial = reshard("dp4", bug="has a stream of its own")
    assert trial.verdict is Verdict.RECOVERED, trial.reason
    notes = " ".join(trial.judgement.notes)
    assert (
        "rank 3: the checkpoint of step 4 holds no RNG state for python, numpy, torch, noise"
        in (notes)
    )


LOST = "kill rank=1 at=step:4/backward"
BACK = f"{LOST}; kill rank=0 at=step:7/backward attempt=2"


@pytest.mark.parametrize(
    ("route", "schedule", "ranks", "restored"),
    [
        pytest.param("dp1:dp2", BACK, [2, 1, 2], [None, 2, 6], id="and back"),
        pytest.param("dp4:dp1", BACK, [2, 4, 1], [None, 2, 6], id="onto a third"),
        pytest.param(
            "dp4:dp1",
            f"{LOST}; kill rank=3 at=restore/load attempt=2",
            [2, 4, 1],
            [None, 2],
            id="struck while it restores there",
        ),
        pytest.param(
            "dp1:dp1:dp2",
            f"{LOST}; kill rank=0 at=restore/agree attempt=2; kill rank=0 at=step:5/data attempt=3",
            [2, 1, 1, 2],
            [None, 2, 4],
            id="struck while it restores there, and back",
        ),
        pytest.param(
            "dp1:dp2",
            f"{LOST}; flip rank=0 at=step:7/data attempt=2; kill rank=0 at=step:7/data attempt=2",
            [2, 1, 2],
            [None, 2, 4],
            id="falls back to what was saved there",
        ),
        pytest.param(
            "dp1:dp4",
            f"{LOST}; flip rank=0 at=step:5/data attempt=2; kill rank=0 at=step:5/data attempt=2",
            [2, 1, 4],
            [None, 2, 2],
            id="falls back to what was saved before",
        ),
    ],
)
def test_a_run_may_change_its_topology_again_and_again(
    reshard: Callable[..., Trial],
    route: str,
    schedule: str,
    ranks: list[int],
    restored: list[int | None],
) -> None:
    trial = reshard(route, schedule)
    assert trial.verdict is Verdict.RECOVERED, trial.reason
    assert [attempt.ranks for attempt in trial.run.attempts] == ranks
    beginnings = read_trajectory(trial.run).beginnings
    assert [beginning.restored for beginning in beginnings] == restored


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_every_sample_has_one_owner_whatever_becomes_of_the_end_of_an_epoch(
    reshard: Callable[..., Trial], tail: str
) -> None:
    # The epoch ends on one rank, in the attempt between two losses.
    trial = reshard("dp1:dp4", BACK, tail=tail)
    assert trial.verdict is Verdict.RECOVERED, trial.reason
    lineage = read_trajectory(trial.run).lineage()
    assert [step.attempt for step in lineage] == [1, 1, 2, 2, 2, 2, 3, 3]
    sizes = [sum(len(rank["samples"][1]) for rank in step.outputs) for step in lineage[4:7]]
    filled = sum(len(rank["padding"]) for rank in lineage[5].outputs)
    assert (sizes, filled) == (([8, 4, 8], 4) if tail == "pad" else ([8, 8, 8], 0))


def test_what_only_the_way_back_leaves_out_is_called_by_name(
    reshard: Callable[..., Trial],
) -> None:
    trial = reshard("dp1:dp2", BACK, bug="forgets the sampler coming back")
    assert (trial.verdict, trial.judgement.component) == (Verdict.DIVERGED, "sampler")
    assert "attempt 3, right after the restore of step 6 onto dp2: sampler" in trial.reason


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (LOST, "onto dp2 in attempt 3"),
        (f"kill rank=1 at=step:2/data; {BACK.partition('; ')[2]}", "onto dp1 in attempt 2"),
        (f"{LOST}; kill rank=0 at=start attempt=2", "onto dp1 in attempt 2"),
    ],
)
def test_a_route_that_is_not_gone_to_its_end_never_passes(
    reshard: Callable[..., Trial], schedule: str, said: str
) -> None:
    trial = reshard("dp1:dp2", schedule)
    assert trial.verdict is Verdict.NOT_EXERCISED
    assert f"no checkpoint was restored {said}" in trial.reason


def test_a_rank_that_only_another_attempt_has_can_be_struck_in_it(
    reshard: Callable[..., Trial],
) -> None:
    trial = reshard("dp4:dp2", f"{LOST}; kill rank=3 at=step:6/data attempt=2")
    assert trial.verdict is Verdict.RECOVERED, trial.reason
    with pytest.raises(ImpossibleFaultError, match=r"attempt 3 has 2 ranks on 1 node"):
        reshard("dp4:dp2", f"{BACK}; kill rank=3 at=step:7/data attempt=3")
