"""The hand-off oracle: what a run that changes its topology must equal, bitwise.

The job runs on its own topology to the step of a checkpoint, hands its state to the other topology
beside the store, and goes on there without interruption; from there it may be handed on in the same
way. Guarantees: each leg is computed once for all processes that share a directory; a leg that is
run again to hand its state on equals itself, and the first one the reference, or the job is
refused. What hands over is the workload's; no code here knows a tensor. Torch-free.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from seatrial.recovery.compare import first_difference

from .case import Leg
from .errors import NondeterministicJobError
from .experiment import Experiment
from .launch.plan import Workload
from .reference import Reference, finished, locked
from .route import Descent, Route, descent_of
from .run import Run, load_run
from .trajectory import Trajectory, read_trajectory

RunExperiment = Callable[[Experiment, Path, Path], Run]
"""Runs an experiment without faults: in a directory, with a store."""


@dataclass(frozen=True, kw_only=True)
class Handover:
    """Which worlds the attempts have, and the workload that hands its state over.

    ``leg(taken, given, steps)`` is the workload that begins with the state in the directory
    ``taken`` and leaves its own in ``given`` after ``steps`` further steps; each may be None.
    """

    route: Route
    leg: Callable[[Path | None, Path | None, int | None], Workload]


@dataclass(frozen=True, kw_only=True)
class Oracles:
    """Obtains the legs of an experiment's oracles, below ``root``."""

    experiment: Experiment
    handover: Handover
    reference: Reference
    root: Path
    run: RunExperiment

    def legs(self, trajectory: Trajectory) -> dict[int, Leg]:
        """By attempt, what it is compared with; without attempts that never began.

        An attempt that started anew on another topology than the first has none either.

        Raises:
            ReferenceFailedError: a leg does not finish.
            NondeterministicJobError: a leg that is run again is another one.
        """
        route, found = self.handover.route, {}
        for beginning in trajectory.beginnings:
            descent = descent_of(beginning.attempt, route, trajectory)
            if descent is not None and descent[0].world == self.experiment.world:
                found[beginning.attempt] = Leg(oracle=self.of(descent), since=descent[-1].since)
        return found

    def of(self, descent: Descent) -> Trajectory:
        """The last leg; its beginning is the state right after the hand-over."""
        if len(descent) == 1:
            return self.reference.trajectory
        subject = self._subject(descent)
        taken = self.root / f"taken-{subject.key}"
        with locked(taken.with_suffix(".lock")):
            if not (taken / "done").exists():
                shutil.rmtree(taken, ignore_errors=True)
                finished(self.run(subject, taken / "run", taken / "store"))
                (taken / "done").touch()
            return read_trajectory(load_run(taken / "run"))

    def _subject(self, descent: Descent) -> Experiment:
        """The last leg as a run of its own."""
        if len(descent) == 1:
            return self.experiment
        *_, last = descent
        assert last.since is not None
        workload = self.handover.leg(self._given(descent[:-1], last.since), None, None)
        return replace(self.experiment, world=last.world, workload=workload)

    def _given(self, descent: Descent, step: int) -> Path:
        """Where the last leg of ``descent`` has left its state of ``step``."""
        whole, subject, since = self.of(descent), self._subject(descent), descent[-1].since
        given = self.root / f"given-{subject.key}-{step}"
        with locked(given.with_suffix(".lock")):
            if not (given / "done").exists():
                shutil.rmtree(given, ignore_errors=True)
                taken = None if since is None else self._given(descent[:-1], since)
                workload = self.handover.leg(taken, given / "state", step - (since or 0))
                part = replace(subject, workload=workload)
                half = finished(self.run(part, given / "run", given / "store"))
                _require_same(read_trajectory(half), whole, step)
                (given / "done").touch()
        return given / "state"


def _require_same(half: Trajectory, whole: Trajectory, step: int) -> None:
    ours, theirs = (
        next(each for each in run.steps if each.number == step) for run in (half, whole)
    )
    difference = first_difference(theirs.state, ours.state)
    if difference is not None:
        raise NondeterministicJobError(
            f"two uninterrupted runs of the job differ at step {step}: {difference}; no recovery "
            "can be judged"
        )
