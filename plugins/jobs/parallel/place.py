"""Where one rank sits in the topology, and what follows from it for data, loss and randomness.

Guarantees: of all ranks exactly one reports each sample, and exactly one each part of the loss;
ranks that compute the same numbers draw from equal streams. Torch is imported only to seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from seatrial.recovery.topology import Topology


@dataclass(frozen=True)
class Place:
    """One rank of a topology."""

    topology: Topology
    rank: int

    def at(self, dimension: str) -> int:
        """The coordinate along one dimension."""
        return self.topology.coordinates(self.rank)[dimension]

    @cached_property
    def data_index(self) -> int:
        return self.topology.data_index(self.rank)

    @cached_property
    def data_size(self) -> int:
        return self.topology.data_size

    @cached_property
    def averaged_over(self) -> int:
        """How many ranks' gradients are averaged; the loss wants their sum.

        Context-parallel ranks have the gradient of their own positions.
        """
        return self.data_size * self.topology.size("cp")

    @cached_property
    def is_first_stage(self) -> bool:
        return self.at("pp") == 0

    @cached_property
    def is_last_stage(self) -> bool:
        return self.at("pp") == self.topology.size("pp") - 1

    @cached_property
    def reports_samples(self) -> bool:
        """Whether this rank stands for all that work on the same samples."""
        return self.is_first_stage and self.at("tp") == 0 and self.at("cp") == 0

    @cached_property
    def reports_loss(self) -> bool:
        """Whether this rank's part of the loss counts; its tensor-parallel peers have it too."""
        return self.is_last_stage and self.at("tp") == 0

    @cached_property
    def streams(self) -> dict[str, str]:
        """Whose each RNG stream is, in words that hold on every topology.

        Python and NumPy augment the data, which all ranks of one data index must see alike. Torch
        draws dropout masks: tensor-parallel ranks drop from the same hidden state and must agree,
        other stages and other positions must not repeat them.
        """
        data = f"data {self.data_index}"
        model = f"{data}, stage {self.at('pp')}, context {self.at('cp')}"
        return {"python": data, "numpy": data, "torch": model, "cuda": model}

    def seed(self, seed: int) -> None:
        """Seed every stream of this process by its owner."""
        from seatrial.recovery.rng import derive_seed, seed_stream

        for stream, owner in self.streams.items():
            seed_stream(stream, derive_seed(seed, f"{stream}/{owner}", 0))
