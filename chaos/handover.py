"""The hand-off oracle: what a run that changes its topology must equal, bitwise.

The job runs on its own topology to the step of a checkpoint, hands its state to the other topology
beside the store, and goes on there without interruption. Guarantees: computed once for all
processes that share a directory; the half on the job's own topology equals the reference, or the
job is refused. What hands over is the workload's; no code here knows a tensor. Torch-free.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from seatrial.recovery.compare import first_difference

from .errors import NondeterministicJobError
from .experiment import Experiment
from .launch.plan import Workload, World
from .reference import Reference, finished, locked
from .run import Run, load_run
from .trajectory import Trajectory, read_trajectory

RunExperiment = Callable[[Experiment, Path, Path], Run]
"""Runs an experiment without faults: in a directory, with a store."""


@dataclass(frozen=True, kw_only=True)
class Handover:
    """Another topology, and the workload's two halves.

    ``giving(directory, step)`` is the workload that ends at ``step`` and leaves its state in
    ``directory``; ``taking(directory)`` the one that begins with it.
    """

    world: World
    giving: Callable[[Path, int], Workload]
    taking: Callable[[Path], Workload]


def obtain_oracle(
    experiment: Experiment,
    handover: Handover,
    step: int,
    *,
    reference: Reference,
    root: Path,
    run: RunExperiment,
) -> Trajectory:
    """The second half, on the other topology; its beginning is the state right after the hand-over.

    Raises:
        ReferenceFailedError: one of the halves does not finish.
        NondeterministicJobError: the first half is not the reference's.
    """
    given = root / f"given-{experiment.key}-{step}"
    with locked(given.with_suffix(".lock")):
        if not (given / "done").exists():
            shutil.rmtree(given, ignore_errors=True)
            first = replace(experiment, workload=handover.giving(given / "state", step))
            half = finished(run(first, given / "run", given / "store"))
            _require_same(read_trajectory(half), reference.trajectory, step)
            (given / "done").touch()
    second = replace(experiment, world=handover.world, workload=handover.taking(given / "state"))
    taken = root / f"taken-{second.key}"
    with locked(taken.with_suffix(".lock")):
        if not (taken / "done").exists():
            shutil.rmtree(taken, ignore_errors=True)
            finished(run(second, taken / "run", taken / "store"))
            (taken / "done").touch()
        return read_trajectory(load_run(taken / "run"))


def _require_same(half: Trajectory, reference: Trajectory, step: int) -> None:
    ours, theirs = (
        next(each for each in run.steps if each.number == step) for run in (half, reference)
    )
    difference = first_difference(theirs.state, ours.state)
    if difference is not None:
        raise NondeterministicJobError(
            f"two uninterrupted runs of the job differ at step {step}: {difference}; no recovery "
            "can be judged"
        )
