"""Verifies that DDP's regrouping of gradient buckets is caught on 4 ranks, called by its name, and
absent where a job avoids it. Four ranks, because a sum of two numbers has no order.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from small_trials import experiment_of

from seatrial.chaos.diagnosis import UNSETTLED_BUCKETS, likely_cause
from seatrial.chaos.schedule import Schedule
from seatrial.chaos.session import Session, Trial
from seatrial.chaos.trajectory import read_trajectory
from seatrial.chaos.verdict import Verdict
from seatrial.recovery.compare import Difference

NAMED = "DDP on 3 or more ranks regroups its gradient buckets"


@pytest.fixture
def killed(session: Session) -> Callable[..., Trial]:
    """A trial of the job with that way to deal with the trap, killed once."""

    def run(bug: str, ranks: int) -> Trial:
        job = "bucket_trap_job:BucketTrapJob"
        experiment = experiment_of(job, {"bug": bug}, ranks=ranks, steps=6)
        return session.trial(experiment, Schedule.parse("kill rank=1 at=step:6/backward"))

    return run


def test_the_trap_is_caught_and_called_by_its_name(killed: Callable[..., Trial]) -> None:
    trial = killed("", 4)
    assert trial.verdict is Verdict.DIVERGED
    assert trial.reason.startswith("attempt 2, step 5: ")
    assert NAMED in trial.reason
    assert "docs/writing-a-job.md" in trial.reason


@pytest.mark.parametrize(("bug", "ranks"), [("settles", 4), ("looks for unused", 4), ("", 2)])
def test_a_job_that_avoids_it_recovers(killed: Callable[..., Trial], bug: str, ranks: int) -> None:
    trial = killed(bug, ranks)
    assert trial.verdict is Verdict.RECOVERED, trial.reason
    assert [each.hazards for each in read_trajectory(trial.run).beginnings] == [(), ()]


@pytest.mark.parametrize(
    ("component", "name", "is_named"),
    [
        ("optimizer", "optimizer/first.weight/exp_avg", True),
        ("model", "model/first.weight", True),
        ("optimizer", "optimizer/param_groups", False),
        ("scheduler", "scheduler", False),
        ("rng", "rng/torch@rank0", False),
    ],
)
def test_other_differences_keep_their_own_cause(component: str, name: str, is_named: bool) -> None:
    difference = Difference(component=component, name=name, kind="value")
    assert (NAMED in likely_cause(difference, [UNSETTLED_BUCKETS])) is is_named
    assert NAMED not in likely_cause(difference)
