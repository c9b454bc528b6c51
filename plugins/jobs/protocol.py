"""What a training program must offer to be put on trial as a `Job`.

Three things: build yourself on a rank, run one step, say what your state is. Everything else (the
loop, checkpoints, restores, the trace, preemption) is `seatrial.plugins.jobs.loop`. A job whose own
code writes its checkpoints, and reads them, offers that as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from seatrial.chaos.launch.context import RankContext
from seatrial.recovery.state import TrainingState


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one rank reports of one optimizer step.

    ``loss`` is the global loss. ``samples`` are the dataset indices that this rank consumed in
    ``epoch``; each sample has exactly one rank. ``padding`` are samples of other owners, that it
    used again to fill a batch; ``skipped`` those that it owns and did not use, because their record
    is damaged. ``tokens`` counts over all ranks.
    """

    loss: float
    epoch: int
    samples: Sequence[int]
    tokens: int = 0
    padding: Sequence[int] = ()
    skipped: Sequence[int] = ()


class Job(Protocol):
    """A training program on trial. One instance lives in one rank of one attempt."""

    def build(self, context: RankContext) -> TrainingState:
        """Build everything on this rank and return the state that a checkpoint must hold.

        The default process group is initialised. Every random number generator has been seeded
        from ``(context.seed, context.rank)``.
        """

    def step(self, context: RankContext) -> StepReport:
        """Run one optimizer step; the phases are ``with context.phase("forward")`` and so on."""


@runtime_checkable
class SavesItself(Protocol):
    """What a `Job` offers that keeps its checkpoints by its own code, below ``context.store``.

    Every rank calls both at the same point. Once `save_checkpoint` has returned on all ranks the
    checkpoint counts as acknowledged.
    """

    def save_checkpoint(self, context: RankContext, state: TrainingState) -> None:
        """Save the state that `Job.build` returned, ``state.progress`` included."""

    def load_checkpoint(self, context: RankContext, state: TrainingState) -> bool:
        """Put the newest checkpoint back, ``state.progress`` included; False if there is none."""
