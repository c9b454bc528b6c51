"""The training loop that drives a `Job`: restore, step, trace, save, and leave when told to.

This is the entry that every rank runs. It guarantees that the state is fingerprinted after the
restore and after every step, that a checkpoint follows every ``interval`` steps and the last one,
and that a SIGTERM on any rank makes all ranks save at the same step and leave with `PREEMPTED`.
Before a step counts, and again before a save, the ranks compare which collectives they called;
before a save also their copies of the state.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from seatrial.chaos.launch.context import RankContext
from seatrial.chaos.supervisor import PREEMPTED
from seatrial.chaos.trajectory import UNSAVED
from seatrial.chaos.uncompared import UNCOMPARED
from seatrial.recovery.buffers import settle_buffers
from seatrial.recovery.collectives.consistency import Consistency
from seatrial.recovery.fingerprint import Fingerprinter
from seatrial.recovery.probe import around
from seatrial.recovery.replicas import Replicas
from seatrial.recovery.run_manifest import changes_between, describe, explain
from seatrial.recovery.state import TrainingState
from seatrial.recovery.store import CheckpointStore, Restored

from .handoff import hand_off, take_over
from .hazards import hazards_of
from .own_checkpoints import OwnCheckpoints, OwnRestored
from .protocol import Job, SavesItself, StepReport, required
from .registry import load_job
from .unsaved import Unsaved


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """What a run of the loop is to do; the arguments of `run` as a value.

    ``omit`` names a component that a restore leaves out, for sensitivity controls; such a run
    ends after ``stop_after`` further steps. ``hand_off`` is the directory where the last step's
    state is handed to another topology, ``take_over`` the one to take it from instead of a
    checkpoint.
    """

    job: str
    steps: int
    interval: int
    params: dict[str, object] = field(default_factory=dict)
    keep_last: int = 2
    omit: str = ""
    stop_after: int | None = None
    hand_off: str = ""
    take_over: str = ""

    def saves_at(self, step: int) -> bool:
        return step == self.steps or step % self.interval == 0


def run(context: RankContext, arguments: dict[str, object]) -> None:
    """Train until ``steps``; the entry of `seatrial.chaos.launch.plan.Workload`."""
    settings = LoopSettings(**arguments)  # type: ignore[arg-type]
    preemption = _Preemption()
    job = load_job(settings.job, _with_store(settings.params, context.store))
    name = type(job).__name__
    state = required(TrainingState, job.build(context), by=f"build() of {name}")
    described = describe(job=job, context_facts=_facts(context, settings), state=state)
    fingerprinter = Fingerprinter(rank=context.rank)
    unsaved = Unsaved(job, state, rank=context.rank)
    consistency = Consistency(context.observer, timeout_s=context.timeout_s)
    _KEPT.append(consistency)
    store: CheckpointStore | OwnCheckpoints
    if isinstance(job, SavesItself):
        store = OwnCheckpoints(job, context, described)
    else:
        store = CheckpointStore(
            context.store,
            keep_last=settings.keep_last,
            topology=context.topology,
            writer={"attempt": context.attempt},
            run=described,
            timeout_s=context.timeout_s,
            guards=[Replicas(rank=context.rank, fingerprinter=fingerprinter), consistency],
        )
    restored: Restored | OwnRestored | None = None
    if settings.take_over:
        take_over(state, Path(settings.take_over), rank=context.rank)
    else:
        restored = store.restore(state.omitting([settings.omit]) if settings.omit else state)
    changes = changes_between(restored.manifest.run, described) if restored else ()
    _record_beginning(context, job, state, fingerprinter, restored, changes)
    last = settings.steps
    if settings.stop_after is not None:
        last = min(last, state.progress.step + settings.stop_after)
    while state.progress.step < last:
        number = state.progress.step + 1
        with around("step", step=number):
            report = required(StepReport, job.step(context), by=f"step() of {name}")
        settle_buffers(state.model)
        leaving = _advance(consistency, state, report, preemption)
        _record_step(context, state, fingerprinter, report, unsaved)
        if leaving or settings.saves_at(number):
            store.save(state, step=number)
            context.trace.record("published", step=number)
        if leaving and number < last:
            print(f"rank {context.rank}: saved step {number} and leaving, as told by SIGTERM")
            sys.exit(PREEMPTED)
    if settings.hand_off:
        hand_off(state, Path(settings.hand_off), rank=context.rank)


def _with_store(params: Mapping[str, object], store: str) -> dict[str, object]:
    """The parameters, with the store's directory where they say ``{store}``."""
    return {
        name: value.replace("{store}", store) if isinstance(value, str) else value
        for name, value in params.items()
    }


def _facts(context: RankContext, settings: LoopSettings) -> dict[str, object]:
    return {
        "job": settings.job,
        "params": settings.params,
        "seed": context.seed,
        "topology": context.topology,
        "steps": settings.steps,
        "backend": dist.get_backend(),
        "device": context.device.type,
    }


_KEPT: list[Consistency] = []
"""As long as the process: the end of a gloo group waits for its threads, 10 ms of every trial."""


class _Preemption:
    """Remembers that SIGTERM arrived; the loop acts at the next step boundary."""

    def __init__(self) -> None:
        self.told = False
        signal.signal(signal.SIGTERM, self._remember)

    def _remember(self, _number: int, _frame: object) -> None:
        self.told = True


def _advance(
    consistency: Consistency, state: TrainingState, report: StepReport, preemption: _Preemption
) -> bool:
    """Count the step if all ranks made the same calls in it; whether some was told to leave."""
    number = state.progress.step + 1
    # Not by a collective of the job's groups: those are the job's, and faults strike at them.
    samples, told = consistency.check(number, counts=(len(report.samples), preemption.told))
    progress = state.progress
    progress.step += 1
    progress.epoch = report.epoch
    progress.samples += samples
    progress.tokens += report.tokens
    return bool(told)


def _record_beginning(
    context: RankContext,
    job: Job,
    state: TrainingState,
    fingerprinter: Fingerprinter,
    restored: Restored | OwnRestored | None,
    changes: tuple[str, ...],
) -> None:
    damaged = [list(each) for each in restored.damaged] if restored else []
    differs = [f"another run saved this checkpoint: {line}" for line in explain(changes)]
    if context.rank == 0:
        for line in differs:
            print(line)
    context.trace.record(
        "began",
        restored=None if restored is None else restored.step,
        source=None if restored is None else restored.manifest.writer.get("attempt"),
        damaged=damaged,
        notes=[*state.notes, *differs],
        samples_per_epoch=getattr(job, "samples_per_epoch", None),
        hazards=hazards_of(state.model),
        fingerprint=fingerprinter(state).to_json(),
    )


def _record_step(
    context: RankContext,
    state: TrainingState,
    fingerprinter: Fingerprinter,
    report: StepReport,
    unsaved: Unsaved,
) -> None:
    context.trace.record(
        "step",
        step=state.progress.step,
        outputs={
            "loss": float(report.loss).hex(),
            "learning rate": [rate.hex() for rate in state.learning_rates()],
            "loss scale": state.loss_scale(),
            "samples": [report.epoch, list(report.samples)],
            "padding": list(report.padding),
            "skipped": list(report.skipped),
            UNSAVED: unsaved(),
        },
        fingerprint=fingerprinter(state).to_json(),
    )
    if unread := unsaved.unread():
        context.trace.record(UNCOMPARED, objects=unread)
