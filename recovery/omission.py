"""A state that is restored except for some components: the negative control of every verdict.

Guarantees: the store finds a destination for every stored tensor and verifies all of them, and what
is omitted stays exactly as the job built it. For `TrainingState.omitting` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from .checkpointable import TensorFacts

if TYPE_CHECKING:
    from .state import TrainingState


class Omission:
    """`Checkpointable` view of ``state`` whose omitted tensors are scratch copies."""

    def __init__(self, state: TrainingState, omitted: frozenset[str]) -> None:
        self._state = state
        self._omitted = omitted
        self._scratch: dict[str, torch.Tensor] = {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Live tensors of what is restored, scratch ones of what is omitted."""
        live = self._state.tensors()
        kept = {name: t for name, t in live.items() if not self._omits(name)}
        omitted = {name: t for name, t in live.items() if self._omits(name)}
        for name, tensor in omitted.items():
            if name not in self._scratch and not name.startswith("optimizer/"):
                self._scratch[name] = tensor.detach().clone()
        return kept | self._scratch

    def shared_objects(self) -> dict[str, object]:
        return self._state.shared_objects()

    def rank_objects(self) -> dict[str, object]:
        return self._state.rank_objects()

    def prepare(self, stored: Mapping[str, TensorFacts]) -> None:
        """Make destinations for ``stored``; an omitted optimizer gets scratch ones only."""
        self._scratch = {}
        if "optimizer" not in self._omitted:
            self._state.prepare(stored)
            return
        names = self._state.parameter_names()
        for optimizer in self._state.optimizers:
            self._scratch |= optimizer.scratch(stored, names)

    def load_objects(
        self, shared: Mapping[str, object], ranks: Mapping[int, Mapping[str, object]], rank: int
    ) -> None:
        self._scratch = {}
        self._state._load_objects(shared, ranks, rank, omitted=self._omitted)

    def _omits(self, name: str) -> bool:
        return name.partition("/")[0] in self._omitted
