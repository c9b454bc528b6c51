"""The recovery regression suite: the bundled job on other topologies than the pre-flight's.

Verifies that the bundled GPT comes back bitwise on every kind of parallelism, under both launchers,
and on another topology than it was killed on, that whole nodes may be lost, and that nothing comes
of a wrong collective. Does not verify your job: copy this file, name your job in the marker, and
keep it in your CI.
"""

from __future__ import annotations

import pytest

from seatrial.plugins.runner import ChaosTrial
from seatrial.recovery import Topology


@pytest.mark.chaos(ranks=2, topology="fsdp2")
@pytest.mark.parametrize(
    "schedule",
    [
        "kill rank=1 at=step:12/backward",
        "kill rank=0 at=step:10/checkpoint/manifest/link; kill rank=1 at=restore/shard/read",
        "terminate rank=0 at=step:7/forward",
        "flip rank=0 at=step:11/optimizer; kill rank=0 at=step:11/optimizer when=after",
    ],
)
def test_fsdp2_recovers(chaos_trial: ChaosTrial, schedule: str) -> None:
    chaos_trial(schedule)


@pytest.mark.chaos(steps=4, checkpoint_interval=2)
@pytest.mark.parametrize(
    "topology",
    [
        *("hsdp2x2", "tp2", "fsdp2-tp2", "dp2-tp2", "pp2", "pp2-dp2", "pp2-tp2", "zero1-dp2"),
        *("dp2-tp2-pp2", "ep2", "cp2"),
    ],
)
def test_every_topology_recovers(chaos_trial: ChaosTrial, topology: str) -> None:
    ranks = Topology.parse(topology).world_size
    experts = 4 if topology.startswith("ep") else 0
    trial = chaos_trial(
        "kill rank=1 at=step:4/backward",
        topology=topology,
        ranks=ranks,
        params={"experts": experts},
    )
    assert trial.steps_lost == 1


@pytest.mark.chaos(steps=6, checkpoint_interval=2, ranks=2, topology="tp2")
@pytest.mark.parametrize(
    "schedule",
    [
        "wrong-reduction rank=1 at=step:6/collective/all_reduce",
        "skip rank=1 at=step:6/collective/all_reduce",
        "garble rank=1 at=step:5/collective/all_reduce",
    ],
)
def test_nothing_comes_of_a_wrong_collective_of_tensor_parallel_ranks(
    chaos_trial: ChaosTrial, schedule: str
) -> None:
    trial = chaos_trial(schedule, params={"experts": 0})
    assert len(trial.run.attempts) == 2


@pytest.mark.chaos(steps=4, checkpoint_interval=2)
@pytest.mark.parametrize("target", ["dp4", "dp2-tp2", "tp2-pp2", "zero1-dp2", "dp1"])
def test_a_killed_run_goes_on_on_another_topology(chaos_trial: ChaosTrial, target: str) -> None:
    trial = chaos_trial("kill rank=1 at=step:4/backward", reshard=target)
    assert trial.run.attempts[1].ranks == Topology.parse(target).world_size


@pytest.mark.chaos(ranks=4, nodes=2, topology="fsdp4", steps=6, checkpoint_interval=2)
def test_a_lost_node_comes_back_after_another_kill_in_the_restore(chaos_trial: ChaosTrial) -> None:
    trial = chaos_trial(
        "kill node=1 at=step:3/backward; kill rank=0 at=restore/load attempt=2; "
        "kill rank=1 at=step:5/forward attempt=3",
        reshard="fsdp2:fsdp2:fsdp4",
    )
    assert [attempt.ranks for attempt in trial.run.attempts] == [4, 2, 2, 4]


@pytest.mark.chaos(ranks=4, nodes=2)
def test_four_ddp_ranks_survive_the_loss_of_a_node(chaos_trial: ChaosTrial) -> None:
    trial = chaos_trial("kill node=1 at=step:12/backward")
    assert trial.steps_lost == 1


@pytest.mark.chaos(launcher="torchrun", steps=8, checkpoint_interval=3)
def test_the_same_job_recovers_under_torchrun(chaos_trial: ChaosTrial) -> None:
    chaos_trial("kill rank=1 at=step:8/backward")


@pytest.mark.chaos(ranks=2, topology="fsdp2")
@pytest.mark.parametrize("component", ["model", "optimizer", "rng"])
def test_fsdp2_notices_what_a_restore_leaves_out(chaos_trial: ChaosTrial, component: str) -> None:
    chaos_trial(omit=component)


@pytest.mark.chaos(steps=8, checkpoint_interval=3, max_restarts=1)
def test_a_fault_that_never_goes_away_stops_the_run_and_keeps_the_checkpoint(
    chaos_trial: ChaosTrial,
) -> None:
    chaos_trial("kill rank=1 at=step:8/backward persistent=yes", expect="STOPPED")
