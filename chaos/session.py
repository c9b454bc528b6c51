"""Running trials: the session in which they share a warm launcher, a reference and a directory.

Guarantees: a trial's files exist until the next one starts (so that a failure can be kept), and
`Session.close` leaves no process and no file of this process's own. Torch-free; one thread.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from secrets import token_hex

from seatrial.recovery.inspect import inspect_store
from seatrial.recovery.storage import is_url

from . import stores as places
from .case import Resharded
from .errors import ChaosError, LaunchError, ReferenceFailedError
from .experiment import Experiment
from .handover import Handover, Oracles
from .launch.launcher import LocalLauncher
from .launch.plan import Workload
from .launch.shared import Use
from .ledger import Ledger
from .own_checkpoints import state_of
from .powerloss import PowerDisk, open_disk
from .reference import Reference, obtain_reference
from .route import Route
from .run import Run, StoreState
from .schedule import Schedule, require_possible
from .supervisor import Assignment, Limits, Progress, supervise
from .timing import StepTimes, Timing, read_timing
from .timing.times import read_times
from .trace import forget_traces
from .trajectory import read_trajectory
from .verdict import Judgement, Verdict, judge


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial's result: what was done, how it was judged, and the run with its traces.

    ``timing`` is what its ranks did with their time; no verdict depends on it.
    """

    schedule: Schedule
    judgement: Judgement
    run: Run
    timing: Timing = field(default_factory=Timing)

    @property
    def verdict(self) -> Verdict:
        return self.judgement.verdict

    @property
    def reason(self) -> str:
        """The verdict in one sentence."""
        return self.judgement.reason

    @property
    def steps_lost(self) -> int:
        """Completed steps that had to be repeated."""
        return self.judgement.steps_lost


class Session:
    """Runs trials, one at a time, in directories below ``root``.

    Args:
        root: shared by all processes of one test session.
        owner: this process's name, unique among those that share ``root``.
        stores: the directory or URL below which checkpoint stores are made; ``root`` if None.
        powerloss: make them on a disk of this kind instead, which can lose power; see
            `seatrial.chaos.powerloss.KINDS`.
        disk: make them on a disk of this kind, which sees every operation of every program on it;
            see `seatrial.chaos.powerloss.OBSERVING`. One that can lose power does so too.
    """

    def __init__(
        self,
        root: Path,
        *,
        owner: str,
        stores: Path | str | None = None,
        powerloss: str = "",
        disk: str = "",
    ) -> None:
        self._root = root
        self._own = root / owner
        self._use = Use(root)
        self._scratch = root / f"{owner}-scratch"
        self._scratch.mkdir(exist_ok=True)
        self._disk: PowerDisk | None = None
        if kind := powerloss or disk:
            where = self._scratch / "disk"
            self._disk = open_disk(kind, where, loses_power=bool(powerloss))
            stores = self._disk.root
        # The place may be shared with other machines, where process numbers are the same.
        name = f"seatrial-{owner}-{token_hex(4)}"
        self._own_stores = None if stores is None else places.below(str(stores), name)
        self._own_directory = None  # of the stores, if it is a directory outside of ``root``
        if self._own_stores is not None and not is_url(self._own_stores):
            self._own_directory = Path(self._own_stores)
        self._made_stores = self._own_directory and not self._own_directory.parent.exists()
        self._count = 0
        self._launchers: dict[tuple[str, tuple[str, ...]], LocalLauncher] = {}
        self._references: dict[str, Reference] = {}
        self._times: dict[Path, list[StepTimes]] = {}

    def trial(
        self, experiment: Experiment, schedule: Schedule, *, progress: Progress | None = None
    ) -> Trial:
        """Run the job under ``schedule`` and judge it.

        Raises:
            UsageError: the schedule can never fire, the job fails by itself, or is not
                deterministic.
        """
        require_possible(schedule, experiment.shape)
        experiment, reference = self._with_its_data(experiment, schedule, progress)
        directory, store = self._fresh()
        steps = range(1, experiment.steps + 1)
        return self._judged(experiment, schedule, reference, directory, store, steps, progress)

    def reshard(
        self,
        experiment: Experiment,
        schedule: Schedule,
        handover: Handover,
        *,
        progress: Progress | None = None,
    ) -> Trial:
        """Run the job under ``schedule``, with attempts on the topologies of a route.

        Raises:
            UsageError: as `trial`, or the job cannot hand its state over.
        """
        route = handover.route
        require_possible(schedule, replace(experiment.shape, later=route.sizes[1:]))
        experiment, reference = self._with_its_data(experiment, schedule, progress)
        directory, store = self._fresh()
        limits = self._limits(experiment, reference)
        run = self._run(experiment, schedule, directory, store, limits, progress, route)

        def run_clean(subject: Experiment, directory: Path, store: Path) -> Run:
            patient = replace(limits, max_restarts=0)
            data = Schedule.parse(subject.data_faults)
            return self._run(subject, data, directory, str(store), patient, progress)

        oracles = Oracles(
            experiment=experiment,
            handover=handover,
            reference=reference,
            root=self._root,
            run=run_clean,
        )
        judgement = judge(
            reference.trajectory,
            run,
            schedule,
            checkpoint_interval=experiment.checkpoint_interval,
            expected_steps=range(1, experiment.steps + 1),
            resharded=Resharded(route=route, legs=oracles.legs(read_trajectory(run))),
        )
        timing = self._timing(run, reference)
        return Trial(schedule=schedule, judgement=judgement, run=run, timing=timing)

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
        source = saved[-2].parent
        start = int(source.name.removeprefix("step-"))
        directory, store = self._fresh()
        places.copy_step(source, store)
        subject = replace(experiment, workload=crippled, max_restarts=0)
        after = range(start + 1, min(start + steps, experiment.steps) + 1)
        return self._judged(subject, Schedule(), reference, directory, store, after, progress)

    def reference(self, experiment: Experiment, *, progress: Progress | None = None) -> Reference:
        """The reference of ``experiment``; see `seatrial.chaos.reference.obtain_reference`."""

        def run_clean(directory: Path, store: Path, silence_s: float) -> Run:
            limits = Limits(
                max_restarts=0,
                silence_s=silence_s,
                stopped_silence_s=silence_s,
                total_s=experiment.run_limit_s,
            )
            data = Schedule.parse(experiment.data_faults)
            if self._own_stores is None:
                return self._run(experiment, data, directory, str(store), limits, progress)
            # At the pace of the place on trial; what is kept of it is kept here.
            there = places.below(self._own_stores, store.name)
            try:
                places.make(there)
                run = self._run(experiment, data, directory, there, limits, progress)
                places.keep(there, store)
            finally:
                places.remove(there)
            return run

        if experiment.key not in self._references:
            found = obtain_reference(experiment, self._root, run_clean)
            self._references[experiment.key] = found
        return self._references[experiment.key]

    def _with_its_data(
        self, experiment: Experiment, schedule: Schedule, progress: Progress | None
    ) -> tuple[Experiment, Reference]:
        """The experiment on data that is damaged as the schedule says for good, if the job can go
        on with it; one that stops there is compared as far as it comes."""
        if schedule.in_the_data.faults:
            damaged = replace(experiment, data_faults=str(schedule.in_the_data))
            try:
                return damaged, self.reference(damaged, progress=progress)
            except ReferenceFailedError:
                pass
        return experiment, self.reference(experiment, progress=progress)

    def keep(self, trial: Trial, directory: Path) -> None:
        """Copy a trial's traces, strikes, rank output and store to ``directory``."""
        shutil.copytree(trial.run.directory, directory, dirs_exist_ok=True)
        if self._own_stores is not None:
            places.keep(places.below(self._own_stores, "store"), directory / "store")

    def close(self) -> None:
        """End all processes and remove this process's directories."""
        for launcher in self._launchers.values():
            launcher.close()
        self._launchers.clear()
        self._clear()
        if self._disk is not None:
            self._disk.close()
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._use.end()
        if self._disk is None and self._made_stores and self._own_directory is not None:
            with contextlib.suppress(OSError):  # another process may still have its own in there
                self._own_directory.parent.rmdir()

    def _judged(
        self,
        experiment: Experiment,
        schedule: Schedule,
        reference: Reference,
        directory: Path,
        store: str,
        expected_steps: range,
        progress: Progress | None,
    ) -> Trial:
        limits = self._limits(experiment, reference)
        run = self._run(experiment, schedule, directory, store, limits, progress)
        judgement = judge(
            reference.trajectory,
            run,
            schedule,
            checkpoint_interval=experiment.checkpoint_interval,
            expected_steps=expected_steps,
        )
        timing = self._timing(run, reference)
        return Trial(schedule=schedule, judgement=judgement, run=run, timing=timing)

    def _timing(self, run: Run, reference: Reference) -> Timing:
        """Of a run, beside the reference; now, as a trial's files do not outlive the next one."""
        clean = reference.run.directory
        if clean not in self._times:
            self._times[clean] = read_times(reference.run)
        return read_timing(run, self._times[clean])

    def _limits(self, experiment: Experiment, reference: Reference) -> Limits:
        # Waiting for a store elsewhere, or for the process of a disk, is as still as a hang.
        asks_whether_still = not (experiment.timeout_s or experiment.object_store or self._disk)
        return Limits(
            max_restarts=experiment.max_restarts,
            silence_s=experiment.timeout_s or reference.silence_s,
            stopped_silence_s=experiment.timeout_s or reference.stopped_silence_s,
            total_s=experiment.run_limit_s,
            still_s=reference.still_s if asks_whether_still else None,
        )

    def _run(
        self,
        experiment: Experiment,
        schedule: Schedule,
        directory: Path,
        store: str,
        limits: Limits,
        progress: Progress | None,
        route: Route | None = None,
    ) -> Run:
        directory.mkdir(parents=True, exist_ok=True)
        launcher = self._launcher(experiment)
        assignment = Assignment(
            workload=experiment.workload,
            world=experiment.world,
            schedule=schedule,
            seed=experiment.seed,
            limits=limits,
            store=store,
            directory=directory,
            inspect=partial(self._look_at_store, directory, set()),
            route=route,
        )
        try:
            return supervise(assignment, launcher, progress=progress, note=launcher.note)
        except LaunchError:
            launcher.close()
            self._launchers.clear()  # the next trial gets another custodian
            raise

    def _look_at_store(self, directory: Path, seen: set[tuple[int, int]], store: str) -> StoreState:
        """The store after an attempt, the power being back if it was cut.

        ``seen`` are the cuts of this run that the power is back from.
        """
        if self._disk is not None:
            self._disk.part()
        strikes = Ledger(directory / "strikes").strikes()
        cuts = {(s.fault, s.attempt) for s in strikes if s.action == "powercut"}
        lost = None
        if self._disk is not None and not cuts <= seen:
            seen |= cuts
            lost = self._disk.restore_power()  # first: nothing can be seen without power
        state = state_of(directory) or _store_state(store)
        if self._disk is None or lost is None:
            return state
        own = f"{Path(store).relative_to(self._disk.root)}/"
        said = [each.removeprefix(own) for each in lost if each.startswith(own)]
        return replace(state, lost=tuple(said))

    def _launcher(self, experiment: Experiment) -> LocalLauncher:
        key = (experiment.launcher, experiment.workload.preload)
        if key not in self._launchers:
            # At most one custodian with its warm torch lives at a time.
            for other in self._launchers.values():
                other.close()
            method, preload = key
            scratch = [self._scratch, self._own]
            scratch += [self._own_directory] if self._own_directory else []
            launcher = LocalLauncher(
                method=method, scratch=scratch, shared=self._root, preload=preload
            )
            self._launchers = {key: launcher}
        return self._launchers[key]

    def _fresh(self) -> tuple[Path, str]:
        """A directory for the next trial and one for its store; the last trial's are removed."""
        self._clear()
        self._count += 1
        directory = self._own / f"trial{self._count}"
        directory.mkdir(parents=True)
        store = places.below(self._own_stores or str(directory), "store")
        places.make(store)
        return directory, store

    def _clear(self) -> None:
        forget_traces()
        shutil.rmtree(self._own, ignore_errors=True)
        if self._own_stores is not None:
            places.remove(self._own_stores)


def _store_state(store: str) -> StoreState:
    report = inspect_store(store)
    published = [step for step in report.steps if step.published]
    return StoreState(
        valid=tuple(step.step for step in published if step.valid),
        damaged={step.step: "; ".join(step.problems) for step in published if not step.valid},
        quarantined=report.quarantined,
        leftovers=report.leftovers,
    )
