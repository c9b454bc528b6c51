"""Which samples come next, the same on every topology.

Guarantees: the order of an epoch is one global permutation that depends on the seed and the epoch
alone, and every sample of an epoch has one intentional owner, or none by choice (see `TAILS`). The
position counts samples, so a run may continue on another number of ranks or with another batch
size. Asking for a batch draws from no shared RNG.

Does not load data or know ranks: every rank asks for the same global batch and takes `rank_share`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .errors import StateError
from .rng import derive_seed

TAILS = ("partial", "drop", "pad")
"""What becomes of the samples that do not fill the last batch of an epoch: ``partial`` makes a
smaller batch of them; ``drop`` leaves them out, other ones in every epoch; ``pad`` fills the batch
up with samples from the beginning of the epoch, which are then used twice (as torch's
``DistributedSampler`` does, without saying which)."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's part of a batch. ``indices`` (int64 ``[n]``, n may be 0) is what it trains on:
    first the ``samples`` that it owns, then the ``padding``, which others own."""

    epoch: int
    indices: torch.Tensor
    samples: tuple[int, ...]
    padding: tuple[int, ...]


def rank_share(batch: torch.Tensor, *, rank: int, world_size: int) -> torch.Tensor:
    """The contiguous part of a global batch (first dimension) that ``rank`` owns.

    Every row has exactly one owner. Sizes differ by at most one, the larger parts on the lower
    ranks; with fewer rows than ranks the last ranks get none.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of the {world_size} ranks that share a batch")
    return batch.tensor_split(world_size)[rank]


class ShuffleSampler:
    """Global batches of dataset indices, without end. ``tail`` is one of `TAILS`.

    Raises:
        ValueError: no samples, no batch, another tail, or a batch that drops every sample.
    """

    def __init__(
        self, *, num_samples: int, seed: int, batch_size: int, tail: str = "partial"
    ) -> None:
        if num_samples < 1 or batch_size < 1:
            raise ValueError(
                f"a sampler needs at least one sample and a batch of at least one, "
                f"got num_samples={num_samples} and batch_size={batch_size}"
            )
        if tail not in TAILS:
            raise ValueError(f"tail={tail!r}: choose one of {', '.join(TAILS)}")
        if tail == "drop" and num_samples < batch_size:
            raise ValueError(
                f"tail='drop' leaves nothing of {num_samples} samples in batches of {batch_size}"
            )
        self.num_samples = num_samples
        self.seed = seed
        self.batch_size = batch_size
        self.tail = tail
        self.epoch = 0
        self.position = 0
        self._order: torch.Tensor | None = None

    def next_batch(self) -> tuple[int, torch.Tensor]:
        """The epoch and the next indices: int64, shape ``[n]`` with 1 <= n <= batch_size."""
        left = self.num_samples - self.position
        if left <= 0 or (self.tail == "drop" and left < self.batch_size):
            self.epoch, self.position, self._order = self.epoch + 1, 0, None
        if self._order is None:
            self._order = self._permutation(self.epoch)
        indices = self._order[self.position : self.position + self.batch_size]
        self.position += len(indices)
        if self.tail == "pad" and len(indices) < self.batch_size:
            filler = torch.arange(self.batch_size - len(indices)) % self.num_samples
            return self.epoch, torch.cat([indices, self._order[filler]])
        return self.epoch, indices.clone()

    def next_share(self, *, rank: int, world_size: int) -> Share:
        """This rank's part of the next batch, which every rank asks for; see `rank_share`."""
        began, position = self.epoch, self.position
        epoch, batch = self.next_batch()
        owned = self.position - (position if epoch == began else 0)
        mine = rank_share(batch, rank=rank, world_size=world_size)
        rows = rank_share(torch.arange(len(batch)), rank=rank, world_size=world_size)
        count = int((rows < owned).sum())
        samples = mine.tolist()
        return Share(
            epoch=epoch,
            indices=mine,
            samples=tuple(samples[:count]),
            padding=tuple(samples[count:]),
        )

    @property
    def samples_per_epoch(self) -> int:
        """How many samples an epoch uses once, if it is taken in batches of one size."""
        rest = self.num_samples % self.batch_size if self.tail == "drop" else 0
        return self.num_samples - rest

    def upcoming(self) -> Iterator[tuple[int, torch.Tensor]]:
        """What `next_batch` will give, without taking it; for a loader that reads ahead.

        The position is that of what was consumed, so the job takes each batch with `next_batch`
        when it trains on it. A loader that calls `next_batch` itself moves the position by what its
        workers have only prefetched, and a restart would skip that. Ask anew after a restore.
        """
        ahead = copy.copy(self)
        while True:
            yield ahead.next_batch()

    def state_dict(self) -> dict[str, int | str]:
        """Everything that decides the next batches, except the batch size."""
        return {
            "num_samples": self.num_samples,
            "seed": self.seed,
            "tail": self.tail,
            "epoch": self.epoch,
            "position": self.position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was captured.

        Raises:
            StateError: the state belongs to a dataset of another size, whose permutation would give
                some samples twice and others never, or has another tail.
        """
        if (saved := state.get("tail", "partial")) != self.tail:
            raise StateError(
                f"the sampler's state was saved with tail={saved!r}, and the one here has "
                f"tail={self.tail!r}; restore it with the tail it was saved with"
            )
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
