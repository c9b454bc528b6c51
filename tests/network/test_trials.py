"""Ranks on several hosts: every fault of the network in one run, and one that meets nothing.

The attempts are real: torchrun on each host, its rendezvous and the process group over the network.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest
from small_trials import experiment_of

from seatrial.chaos.experiment import Experiment
from seatrial.chaos.launch.plan import World
from seatrial.chaos.schedule import Schedule
from seatrial.chaos.session import Session, Trial
from seatrial.chaos.trace import Record
from seatrial.chaos.verdict import Verdict

EVENTFUL = (
    "partition node=1 at=step:1/backward heal=0.3; "
    "reset node=1 at=step:3/backward; "
    "crash node=1 at=step:5/backward attempt=2; "
    "partition node=1 at=step:5/backward attempt=3 way=out"
)
"""Attempt 1 is held up and then reset, 2 loses a host, 3 is not heard, 4 completes."""

QUIET = "partition node=1 at=step:3/forward heal=0.05; delay rank=* at=step:3/forward seconds=0.6"
"""Nobody has anything to say while the link is cut."""


def experiment() -> Experiment:
    """Six steps of the tiny job on two hosts, a checkpoint after every second one."""
    small = experiment_of("tiny_job:TinyJob", {}, steps=6)
    world = World(ranks=2, nodes=2, topology="dp2", device="cpu")
    # Cold ranks import no more than they need.
    workload = replace(small.workload, preload=("seatrial.plugins.jobs.loop", "tiny_job"))
    return replace(small, workload=workload, world=world, launcher="hosts")


@pytest.fixture(scope="module")
def session(available: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Runs trials; the reference is shared with the other workers of this pytest."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if base.name.startswith("popen-") else base
    session = Session(shared / "network-trials", owner=base.name)
    yield session
    session.close()


def saw(trial: Trial, attempt: int, did: str) -> Record:
    """The only record of the switch of something that it did."""
    (record,) = [r for r in trial.run.network(attempt) if r.get("did") == did]
    return record


# One test, because each worker would run the trial of a fixture anew, and it takes half a minute.
def test_a_run_recovers_from_all_that_a_network_may_do(session: Session) -> None:
    trial = session.trial(experiment(), Schedule.parse(EVENTFUL))
    assert trial.verdict is Verdict.RECOVERED, trial.reason
    endings = [attempt.ending for attempt in trial.run.attempts]
    assert endings == ["failed", "failed", "hung", "completed"]
    require_that_the_healed_partition_held_ranks_up_and_no_more(trial)
    require_that_the_reset_broke_connections_of_the_job(trial)
    require_that_the_crash_took_rank_and_agent_of_the_host(trial)
    require_that_the_hang_names_the_host(trial)


def require_that_the_healed_partition_held_ranks_up_and_no_more(trial: Trial) -> None:
    assert saw(trial, 1, "kept")["waiting"]
    cut, healed = (float(str(saw(trial, 1, did)["t"])) for did in ("cut", "heal"))
    for rank in (0, 1):
        steps = [r for r in trial.run.trace(1, rank) if r["kind"] == "step"]
        assert [r["step"] for r in steps] == [1, 2]
        assert cut + 0.3 <= healed < float(str(steps[0]["t"]))


def require_that_the_reset_broke_connections_of_the_job(trial: Trial) -> None:
    assert saw(trial, 1, "reset")["gone"]
    assert trial.run.attempts[0].exits == {0: 1, 1: 1}
    assert "gloo" in trial.run.attempts[0].cause


def require_that_the_crash_took_rank_and_agent_of_the_host(trial: Trial) -> None:
    attempt = trial.run.attempts[1]
    assert (attempt.culprit, attempt.exits[1]) == (1, -signal.SIGKILL)
    agent, rank = cast(list[str], saw(trial, 2, "crash")["killed"])
    worker = "launch.torchrun_worker"
    assert (worker in agent, worker in rank) == (False, True)


def require_that_the_hang_names_the_host(trial: Trial) -> None:
    cause = trial.run.attempts[2].cause
    assert "no rank did anything" in cause
    assert "host 1 (rank 1) was not heard: what it sent was lost" in cause


def test_a_partition_that_nothing_crossed_proves_nothing(session: Session) -> None:
    trial = session.trial(experiment(), Schedule.parse(QUIET))
    assert trial.verdict is Verdict.NOT_EXERCISED
    assert "nothing was sent over that link while it was cut" in trial.reason
    assert trial.run.attempts[0].ending == "completed"
