"""Ranks on several hosts: every fault of the network in one run, and one that meets nothing.

The attempts are real: torchrun on each host, its rendezvous and the process group over the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from small_trials import experiment_of

from seatrial.chaos.experiment import Experiment
from seatrial.chaos.launch.plan import World
from seatrial.chaos.schedule import Schedule
from seatrial.chaos.session import Session, Trial
from seatrial.chaos.verdict import Verdict

EVENTFUL = (
    "partition node=1 at=step:1/backward heal=0.3; "
    "reset node=1 at=step:3/backward; "
    "crash node=1 at=step:5/backward attempt=2; "
    "partition node=1 at=step:5/backward attempt=3 way=out"
)
"""Attempt 1 is held up and reset, 2 loses a host, 3 is cut off, 4 completes."""


def experiment(launcher: str = "hosts") -> Experiment:
    """Six steps of the tiny job on two hosts, a checkpoint after every second one."""
    small = experiment_of("tiny_job:TinyJob", {}, steps=6)
    world = World(ranks=2, nodes=2, topology="dp2", device="cpu")
    return replace(small, world=world, launcher=launcher)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    session = Session(tmp_path_factory.mktemp("session"), owner="test")
    yield session
    session.close()


@pytest.fixture(scope="module")
def eventful(session: Session) -> Trial:
    return session.trial(experiment(), Schedule.parse(EVENTFUL))


def test_a_run_recovers_from_all_that_a_network_may_do(eventful: Trial) -> None:
    assert eventful.verdict is Verdict.RECOVERED, eventful.reason
    endings = [attempt.ending for attempt in eventful.run.attempts]
    assert endings == ["failed", "failed", "hung", "completed"]
