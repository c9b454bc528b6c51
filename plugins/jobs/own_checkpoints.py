"""The checkpoints of a job that writes them by its own code, in place of this project's store.

Guarantees: the disk, if it observes, knows them for checkpoints; a step counts as saved when every
rank's code has returned. Does not: inspect, verify or delete anything. For the loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from seatrial.chaos.errors import UsageError
from seatrial.chaos.launch.context import RankContext
from seatrial.chaos.observed.control import store_is_the_jobs
from seatrial.recovery.checkpointable import Checkpointable
from seatrial.recovery.collectives.group import ObservedGroup
from seatrial.recovery.probe import around
from seatrial.recovery.state import TrainingState

from .protocol import SavesItself


@dataclass(frozen=True, kw_only=True)
class OwnManifest:
    """What is known of such a checkpoint: nothing but that this run may read it."""

    run: Mapping[str, object]
    writer: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OwnRestored:
    """A `seatrial.recovery.store.Restored` of such a checkpoint."""

    step: int
    manifest: OwnManifest
    damaged: tuple[tuple[int, str], ...] = ()


class OwnCheckpoints:
    """What the loop asks of a `seatrial.recovery.store.CheckpointStore`, asked of the job."""

    def __init__(
        self, job: SavesItself, context: RankContext, described: Mapping[str, object]
    ) -> None:
        self._job = job
        self._context = context
        self._described = described
        context.trace.record("stores", by="job")
        store_is_the_jobs(context.store)

    def restore(self, state: Checkpointable) -> OwnRestored | None:
        """Let the job restore.

        Raises:
            UsageError: a component was to be left out, which the job's own code knows nothing of.
        """
        if not isinstance(state, TrainingState):
            raise UsageError("a job that restores by its own code has no sensitivity controls")
        # Of a run's first attempt nothing is there yet: whatever the job looks for, a fault that
        # waits for a restore would strike before there is one.
        begins = self._context.attempt == 1
        with contextlib.nullcontext() if begins else around("restore"):
            if not self._job.load_checkpoint(self._context, state):
                return None
        return OwnRestored(step=state.progress.step, manifest=OwnManifest(run=self._described))

    def save(self, state: TrainingState, *, step: int) -> None:
        """Let the job save, and wait for all ranks."""
        with around("checkpoint", step=step):
            self._job.save_checkpoint(self._context, state)
            world = dist.group.WORLD
            assert isinstance(world, ObservedGroup)
            world.unobserved.barrier().wait()  # not a collective of the job: no fault counts it
