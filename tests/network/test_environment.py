"""What ranks on hosts are given: torchrun's environment, and what every launcher gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.chaos.launch.launcher import LocalLauncher
from seatrial.chaos.launch.plan import Workload, World
from seatrial.chaos.network.layout import address
from seatrial.chaos.run import StoreState
from seatrial.chaos.schedule import Schedule
from seatrial.chaos.supervisor import Assignment, Limits, supervise

SILENCE_S = 60.0


@pytest.mark.usefixtures("available")
def test_ranks_on_hosts_have_the_contract_of_every_launcher(tmp_path: Path) -> None:
    assignment = Assignment(
        workload=Workload(entry="rank_programs:describe_environment", arguments={}),
        world=World(ranks=4, nodes=2, topology="dp4", device="cpu"),
        schedule=Schedule(),
        seed=3,
        limits=Limits(max_restarts=0, silence_s=SILENCE_S, stopped_silence_s=SILENCE_S),
        store=str(tmp_path / "store"),
        directory=tmp_path / "run",
        inspect=lambda _: StoreState(),
    )
    with LocalLauncher(method="hosts", scratch=[tmp_path]) as launcher:
        run = supervise(assignment, launcher)
    assert run.attempts[0].exits == dict.fromkeys(range(4), 0), run.attempts[0]
    for rank in range(4):
        (found,) = [r for r in run.trace(1, rank) if r["kind"] == "environment"]
        assert found["variables"] == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % 2),
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": str(rank // 2),
            "GROUP_WORLD_SIZE": "2",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": "4",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": "run",
        }
        assert found["master"] == address(0)
        assert (found["tmpdir"], found["backend"], found["threads"]) == ("tmp", "gloo", 1)
        told = found["told"]
        assert isinstance(told, dict)
        assert (told["rank"], told["local"], told["node"]) == (rank, rank % 2, rank // 2)
    assert (run.attempts[0].strays, run.attempts[0].litter) == ((), ())
