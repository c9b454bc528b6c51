"""Verifies that batches which data-loader workers have prefetched are neither lost nor repeated by
a restart, whether the sampler's position or torchdata's loader is the state, and that a loader
whose workers move the sampler ahead of the training is found out.

Random numbers that workers draw are no state of a rank, and not covered.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from small_trials import experiment_of

from seatrial.chaos.schedule import Schedule
from seatrial.chaos.session import Session, Trial
from seatrial.chaos.verdict import Verdict


@pytest.fixture
def try_loader(session: Session) -> Callable[[str, str], Trial]:
    """``try_loader("stateful", "kill …")``: two ranks, each with two workers, 3 steps an epoch."""

    def run(loader: str, schedule: str) -> Trial:
        experiment = experiment_of("loader_job:LoaderJob", {"loader": loader}, steps=6)
        return session.trial(experiment, Schedule.parse(schedule))

    return run


@pytest.mark.parametrize("loader", ["upcoming", "stateful"])
def test_prefetched_batches_are_neither_lost_nor_repeated(
    try_loader: Callable[[str, str], Trial], loader: str
) -> None:
    # Restored before the uneven last batch of an epoch, and again in the middle of the next.
    trial = try_loader(
        loader, "kill rank=1 at=step:3/data when=after; kill rank=0 at=step:5/forward attempt=2"
    )
    assert trial.verdict is Verdict.RECOVERED, trial.reason
    assert trial.judgement.attempts == 3


def test_a_loader_that_moves_the_sampler_ahead_of_the_training_is_found(
    try_loader: Callable[[str, str], Trial],
) -> None:
    trial = try_loader("runs ahead", "kill rank=1 at=step:3/data when=after")
    assert (trial.verdict, trial.judgement.component) == (Verdict.DIVERGED, "sampler")
    assert "attempt 2, step 3: the samples of rank 0 differ" in trial.reason
