"""Trials of the small jobs: experiments that one warm parent serves, whatever the job."""

from __future__ import annotations

from seatrial.chaos.experiment import Experiment
from seatrial.chaos.launch.plan import Workload, World

JOBS = (
    *("bucket_trap_job", "loader_job", "records_job", "resharding_job"),
    *("tiny_job", "traits_job"),
)


def experiment_of(
    job: str,
    params: dict[str, object],
    *,
    ranks: int = 2,
    steps: int = 8,
    interval: int = 2,
    entry: str = "seatrial.plugins.jobs.loop:run",
) -> Experiment:
    """``steps`` steps of the job on data-parallel ranks, a checkpoint after every ``interval``."""
    return Experiment(
        workload=Workload(
            entry=entry,
            arguments={"job": job, "params": params, "steps": steps, "interval": interval},
            preload=("seatrial.plugins.jobs.loop", *JOBS),
        ),
        world=World(ranks=ranks, topology=f"dp{ranks}", device="cpu"),
        seed=0,
        steps=steps,
        checkpoint_interval=interval,
    )
