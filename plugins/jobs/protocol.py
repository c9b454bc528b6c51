"""What a training program must offer to be put on trial as a `Job`.

Three things: build yourself on a rank, run one step, say what your state is. Everything else (the
loop, checkpoints, restores, the trace, preemption) is `seatrial.plugins.jobs.loop`. A job whose own
code writes its checkpoints, and reads them, offers that as well.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, SupportsIndex, TypeVar, runtime_checkable

from seatrial.chaos.errors import UsageError
from seatrial.chaos.launch.context import RankContext
from seatrial.recovery.state import TrainingState

_Kind = TypeVar("_Kind")


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one rank reports of one optimizer step.

    ``loss`` is the global loss. ``samples`` are the dataset indices that this rank consumed in
    ``epoch``; each sample has exactly one rank. ``padding`` are samples of other owners, that it
    used again to fill a batch; ``skipped`` those that it owns and did not use, because their record
    is damaged. ``tokens`` counts over all ranks. Tensors and NumPy values are taken for the numbers
    that they hold.

    Raises:
        UsageError: indices or counts that are no whole numbers, or a loss that is no number.
    """

    loss: float
    epoch: int
    samples: Sequence[int]
    tokens: int = 0
    padding: Sequence[int] = ()
    skipped: Sequence[int] = ()

    def __post_init__(self) -> None:
        self._read("loss", float)
        for name in ("epoch", "tokens"):
            self._read(name, operator.index)
        for name in ("samples", "padding", "skipped"):
            self._read(name, _indices)

    def _read(self, name: str, read: Callable[[Any], object]) -> None:
        given = getattr(self, name)
        try:
            object.__setattr__(self, name, read(given))
        except (TypeError, ValueError, RuntimeError):
            wanted = {"loss": "one number", "epoch": "a whole number", "tokens": "a whole number"}
            raise UsageError(
                f"StepReport: {name}={reprlib.repr(given)} should be "
                f"{wanted.get(name, 'a sequence of whole numbers')}"
            ) from None


def _indices(given: Iterable[SupportsIndex]) -> tuple[int, ...]:
    return tuple(operator.index(each) for each in given)


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


def required(kind: type[_Kind], given: object, *, by: str) -> _Kind:
    """What a method of a job returned, if it is what it should be; ``by`` names the method.

    Raises:
        UsageError: it is not.
    """
    if not isinstance(given, kind):
        got, wanted = reprlib.repr(given), kind.__name__
        raise UsageError(f"{by} returned {got}; return a {wanted}")
    return given
