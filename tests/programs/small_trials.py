"""Trials of the small jobs: experiments that one warm parent serves, whatever the job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from seatrial.chaos.experiment import Experiment
from seatrial.chaos.handover import Handover
from seatrial.chaos.launch.plan import Workload, World
from seatrial.chaos.route import Route

JOBS = (
    *("bucket_trap_job", "loader_job", "native_jobs", "records_job", "resharding_job"),
    *("side_file_job", "tiny_job", "traits_job"),
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


def handover_of(experiment: Experiment, restarts: str) -> Handover:
    """Restarts on data-parallel ranks: ``dp4``, or ``dp1:dp2`` for one after the other."""
    workload = experiment.workload

    def leg(taken: Path | None, given: Path | None, steps: int | None) -> Workload:
        more = {"take_over": str(taken or ""), "hand_off": str(given or ""), "stop_after": steps}
        return replace(workload, arguments={**workload.arguments, **more})

    worlds = [World(ranks=int(t[2:]), topology=t, device="cpu") for t in restarts.split(":")]
    return Handover(route=Route((experiment.world, *worlds)), leg=leg)
