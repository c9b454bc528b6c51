"""Which samples come next, the same on every topology.

Guarantees: the order of an epoch is one global permutation that depends on the seed and the epoch
alone, every sample is given out exactly once an epoch (the last batch keeps the partial tail), and
the position counts samples, so a run may continue on another number of ranks or with another batch
size. Asking for a batch draws from no shared RNG.

Does not load data or know ranks: every rank asks for the same global batch and takes `rank_share`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import torch

from .errors import StateError
from .rng import derive_seed


def rank_share(batch: torch.Tensor, *, rank: int, world_size: int) -> torch.Tensor:
    """The contiguous part of a global batch (first dimension) that ``rank`` owns.

    Every row has exactly one owner. Sizes differ by at most one, the larger parts on the lower
    ranks; with fewer rows than ranks the last ranks get none.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of the {world_size} ranks that share a batch")
    return batch.tensor_split(world_size)[rank]


class ShuffleSampler:
    """Global batches of dataset indices, without end."""

    def __init__(self, *, num_samples: int, seed: int, batch_size: int) -> None:
        if num_samples < 1 or batch_size < 1:
            raise ValueError(
                f"a sampler needs at least one sample and a batch of at least one, "
                f"got num_samples={num_samples} and batch_size={batch_size}"
            )
        self.num_samples = num_samples
        self.seed = seed
        self.batch_size = batch_size
        self.epoch = 0
        self.position = 0
        self._order: torch.Tensor | None = None

    def next_batch(self) -> tuple[int, torch.Tensor]:
        """The epoch and the next indices: int64, shape ``[n]`` with 1 <= n <= batch_size."""
        if self.position >= self.num_samples:
            self.epoch, self.position, self._order = self.epoch + 1, 0, None
        if self._order is None:
            self._order = self._permutation(self.epoch)
        indices = self._order[self.position : self.position + self.batch_size]
        self.position += len(indices)
        return self.epoch, indices.clone()

    def upcoming(self) -> Iterator[tuple[int, torch.Tensor]]:
        """What `next_batch` will give, without taking it; for a loader that reads ahead.

        The position is that of what was consumed, so the job takes each batch with `next_batch`
        when it trains on it. A loader that calls `next_batch` itself moves the position by what its
        workers have only prefetched, and a restart would skip that. Ask anew after a restore.
        """
        ahead = copy.copy(self)
        while True:
            yield ahead.next_batch()

    def state_dict(self) -> dict[str, int]:
        """Everything that decides the next batches, except the batch size."""
        return {
            "num_samples": self.num_samples,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where ``state`` was captured.

        Raises:
            StateError: the state belongs to a dataset of another size; its permutation would give
                some samples twice and others never.
        """
        if state["num_samples"] != self.num_samples:
            raise StateError(
                f"the sampler's state counts {state['num_samples']} samples, but the dataset here "
                f"has {self.num_samples}; restore it with the dataset it was saved with"
            )
        self.seed, self.epoch, self.position = state["seed"], state["epoch"], state["position"]
        self._order = None

    def _permutation(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator()
        generator.manual_seed(derive_seed(self.seed, "sampler", epoch))
        return torch.randperm(self.num_samples, generator=generator)
