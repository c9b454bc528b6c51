"""A trial: reference, faulted run, verdict; and the session in which trials share what is costly.

`Session` guarantees that the reference of an experiment is computed once for all processes that
share its root directory, that the job was seen to be deterministic before anything is judged, and
that `close` leaves no process and no file. Torch-free.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

from seatrial.recovery.inspect import inspect_store

from .diagnosis import NONDETERMINISM_CAUSES
from .errors import ChaosError, NondeterministicJobError, ReferenceFailedError
from .launch.launcher import LocalLauncher
from .launch.plan import Workload, World
from .run import Run, StoreState, load_run
from .schedule import Schedule, Shape, require_possible
from .supervisor import Assignment, Limits, Progress, supervise
from .trajectory import Trajectory, read_trajectory
from .verdict import Judgement, Verdict, judge

_FIRST_SILENCE_S = 60.0
_SILENCE_S_MIN = 5.0
_SILENCE_FACTOR = 20.0


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The job on trial and the size of its runs; what a reference is the reference of.

    ``timeout_s`` is how long no rank may do anything; None derives it from the reference.
    """

    workload: Workload
    world: World
    seed: int
    steps: int
    checkpoint_interval: int
    max_restarts: int = 3
    timeout_s: float | None = None
    launcher: str = "fork"

    @property
    def shape(self) -> Shape:
        return Shape(
            world_size=self.world.ranks,
            ranks_per_node=self.world.ranks_per_node,
            steps=self.steps,
            checkpoint_interval=self.checkpoint_interval,
        )

    @property
    def key(self) -> str:
        """Equal for experiments that have the same reference."""
        facts = {**asdict(self), "max_restarts": None, "timeout_s": None}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The uninterrupted run. ``silence_s`` is the hang deadline that its own pace suggests."""

    run: Run
    trajectory: Trajectory
    silence_s: float
    store: Path


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial's result."""

    schedule: Schedule
    judgement: Judgement
    run: Run
    total_s: float

    @property
    def verdict(self) -> Verdict:
        return self.judgement.verdict


class Session:
    """Runs trials, one at a time, in directories below ``root``.

    Args:
        root: shared by all processes of one test session.
        owner: this process's name, unique among those that share ``root``.
        stores: where checkpoint stores are made; below ``root`` if None.
    """

    def __init__(self, root: Path, *, owner: str, stores: Path | None = None) -> None:
        self._root = root
        self._owner = owner
        self._stores = stores
        self._count = 0
        self._launchers: dict[tuple[str, tuple[str, ...]], LocalLauncher] = {}
        self._references: dict[str, Reference] = {}
        root.mkdir(parents=True, exist_ok=True)

    def trial(
        self, experiment: Experiment, schedule: Schedule, *, progress: Progress | None = None
    ) -> Trial:
        """Run the job under ``schedule`` and judge it.

        Raises:
            UsageError: the schedule can never fire, the job fails by itself, or is not
                deterministic.
        """
        require_possible(schedule, experiment.shape)
        reference = self.reference(experiment, progress=progress)
        with self._directory() as directory:
            store = self._store(directory)
            run = self._run(experiment, schedule, directory, store, reference.silence_s, progress)
            judgement = judge(
                reference.trajectory,
                run,
                schedule,
                checkpoint_interval=experiment.checkpoint_interval,
                expected_steps=range(1, experiment.steps + 1),
            )
            return Trial(schedule=schedule, judgement=judgement, run=run, total_s=run.total_s)

    def control(
        self,
        experiment: Experiment,
        crippled: Workload,
        *,
        steps: int,
        progress: Progress | None = None,
    ) -> Trial:
        """Resume the reference's last checkpoint but one by ``crippled``, for ``steps`` steps.

        The crippled workload is the same job with a restore that leaves something out; an honest
        verifier calls the result DIVERGED.
        """
        reference = self.reference(experiment, progress=progress)
        saved = sorted(reference.store.glob("step-*/manifest.json"))
        if len(saved) < 2:
            raise ChaosError("a control needs a reference with at least two checkpoints")
        start = int(saved[-2].parent.name.removeprefix("step-"))
        with self._directory() as directory:
            store = self._store(directory)
            shutil.copytree(saved[-2].parent, store / saved[-2].parent.name)
            run = self._run(
                replace(experiment, workload=crippled, max_restarts=0),
                Schedule(),
                directory,
                store,
                reference.silence_s,
                progress,
            )
            judgement = judge(
                reference.trajectory,
                run,
                Schedule(),
                checkpoint_interval=experiment.checkpoint_interval,
                expected_steps=range(start + 1, start + steps + 1),
            )
            return Trial(schedule=Schedule(), judgement=judgement, run=run, total_s=run.total_s)

    def reference(self, experiment: Experiment, *, progress: Progress | None = None) -> Reference:
        """The reference of ``experiment``: computed here, or by another process meanwhile.

        Raises:
            ReferenceFailedError: the job does not finish by itself.
            NondeterministicJobError: two uninterrupted runs differ.
        """
        if experiment.key not in self._references:
            directory = self._root / f"reference-{experiment.key}"
            with _locked(directory.with_suffix(".lock")):
                if not (directory / "checked").exists():
                    self._compute_reference(experiment, directory, progress)
            self._references[experiment.key] = self._read_reference(directory)
        return self._references[experiment.key]

    def keep(self, trial: Trial, directory: Path) -> None:
        """Copy a trial's traces, strikes and rank output to ``directory``."""
        shutil.copytree(trial.run.directory, directory, dirs_exist_ok=True)

    def close(self) -> None:
        """End all processes and remove this process's directories."""
        for launcher in self._launchers.values():
            launcher.close()
        self._launchers.clear()
        for path in (self._root / self._owner, *self._own_stores()):
            shutil.rmtree(path, ignore_errors=True)

    def _own_stores(self) -> list[Path]:
        return [] if self._stores is None else [self._stores / f"seatrial-{self._owner}"]

    def _compute_reference(
        self, experiment: Experiment, directory: Path, progress: Progress | None
    ) -> None:
        failure = directory / "failed"
        if failure.exists():
            kind, _, message = failure.read_text().partition("\n")
            raise (NondeterministicJobError if kind == "differs" else ReferenceFailedError)(message)
        shutil.rmtree(directory, ignore_errors=True)
        silence_s = experiment.timeout_s or _FIRST_SILENCE_S
        try:
            runs = [
                self._run(
                    replace(experiment, max_restarts=0),
                    Schedule(),
                    directory / name,
                    directory / f"{name}-store",
                    silence_s,
                    progress,
                )
                for name in ("first", "second")
            ]
            for run in runs:
                _require_finished(run)
            _require_equal(experiment, *runs)
        except (NondeterministicJobError, ReferenceFailedError) as error:
            differs = isinstance(error, NondeterministicJobError)
            failure.write_text(f"{'differs' if differs else 'failed'}\n{error}")
            raise
        shutil.rmtree(directory / "second")
        shutil.rmtree(directory / "second-store")
        quiet_s = max(_SILENCE_S_MIN, _SILENCE_FACTOR * _longest_gap_s(runs[0]))
        (directory / "checked").write_text(str(experiment.timeout_s or quiet_s))

    def _read_reference(self, directory: Path) -> Reference:
        run = load_run(directory / "first")
        return Reference(
            run=run,
            trajectory=read_trajectory(run),
            silence_s=float((directory / "checked").read_text()),
            store=directory / "first-store",
        )

    def _run(
        self,
        experiment: Experiment,
        schedule: Schedule,
        directory: Path,
        store: Path,
        silence_s: float,
        progress: Progress | None,
    ) -> Run:
        directory.mkdir(parents=True, exist_ok=True)
        launcher = self._launcher(experiment)
        assignment = Assignment(
            workload=experiment.workload,
            world=experiment.world,
            schedule=schedule,
            seed=experiment.seed,
            limits=Limits(max_restarts=experiment.max_restarts, silence_s=silence_s),
            store=store,
            directory=directory,
            inspect=_store_state,
        )
        return supervise(assignment, launcher, progress=progress, note=launcher.note)

    def _launcher(self, experiment: Experiment) -> LocalLauncher:
        key = (experiment.launcher, experiment.workload.preload)
        if key not in self._launchers:
            # At most one custodian with its warm torch lives at a time.
            for other in self._launchers.values():
                other.close()
            self._launchers = {
                key: LocalLauncher(
                    method=experiment.launcher,
                    scratch=self._root,
                    preload=experiment.workload.preload,
                )
            }
        return self._launchers[key]

    @contextmanager
    def _directory(self) -> Iterator[Path]:
        """A directory for one trial; the one before it is removed, so that failures can be kept."""
        self._count += 1
        shutil.rmtree(self._root / self._owner, ignore_errors=True)
        directory = self._root / self._owner / f"trial{self._count}"
        directory.mkdir(parents=True)
        yield directory

    def _store(self, directory: Path) -> Path:
        if self._stores is None:
            return directory / "store"
        store = self._own_stores()[0] / directory.name
        shutil.rmtree(store.parent, ignore_errors=True)
        store.mkdir(parents=True)
        return store


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel drops it if this process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _store_state(directory: Path) -> StoreState:
    report = inspect_store(directory)
    published = [step for step in report.steps if step.published]
    return StoreState(
        valid=tuple(step.step for step in published if step.valid),
        damaged={step.step: "; ".join(step.problems) for step in published if not step.valid},
        quarantined=report.quarantined,
        leftovers=report.leftovers,
    )


def _require_finished(run: Run) -> None:
    if not run.completed:
        last = run.attempts[-1]
        raise ReferenceFailedError(
            f"the job does not finish even when nothing is done to it: {last.cause}"
            + (f"\n{last.output}" if last.output else "")
        )


def _require_equal(experiment: Experiment, first: Run, second: Run) -> None:
    judgement = judge(
        read_trajectory(first),
        second,
        Schedule(),
        checkpoint_interval=experiment.checkpoint_interval,
        expected_steps=range(1, experiment.steps + 1),
    )
    if judgement.verdict is Verdict.DIVERGED:
        raise NondeterministicJobError(
            f"two uninterrupted runs of the job differ, so no recovery can be judged: first in "
            f"{judgement.component}, {judgement.reason}. Usual causes: "
            f"{'; '.join(NONDETERMINISM_CAUSES)}"
        )


def _longest_gap_s(run: Run) -> float:
    """The longest time in which no rank recorded anything."""
    times = sorted(float(str(record["t"])) for _, _, trace in run.traces() for record in trace)
    times = [run.attempts[0].launched_t, *times, run.attempts[-1].ended_t]
    return max(after - before for before, after in pairwise(times))
