"""What the checkpoint store asks of the state it saves, and nothing else.

`TrainingState` implements it; a job with a state class of its own may too. The store never looks
inside an object and never learns what a component means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, kw_only=True)
class TensorFacts:
    """What a checkpoint knows of one logical tensor: dtype as ``torch.float32``, global shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Checkpointable(Protocol):
    """State that a checkpoint can capture and put back in place."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live tensors by logical name, the same name on every topology.

        A `DTensor` is this rank's part of the logical tensor; a plain tensor is whole, and every
        rank that has it holds equal bits. No copy is made.
        """

    def shared_objects(self) -> dict[str, object]:
        """Plain data (see `seatrial.recovery.plain`) that is equal on every rank."""

    def rank_objects(self) -> dict[str, object]:
        """Plain data that belongs to this rank alone, such as its RNG states."""

    def prepare(self, stored: Mapping[str, TensorFacts]) -> None:
        """Make `tensors` return a destination for every stored tensor that this rank should hold.

        Called before the tensors are read, with everything the checkpoint holds. Lazily created
        optimizer state is created here.
        """

    def load_objects(
        self, shared: Mapping[str, object], ranks: Mapping[int, Mapping[str, object]], rank: int
    ) -> None:
        """Put plain data back after every tensor has been verified and read.

        ``ranks`` holds the rank objects of every rank that saved, by rank of the saving topology.
        """
