"""How many ranks hold which part: the topology of a job as one value that prints and parses.

Guarantees: ``Topology.parse(str(topology)) == topology``; the product of the dimensions is checked
against a world size by `Topology.require`; coordinates, groups and the `DeviceMesh` agree: all
number the ranks row by row in `MESH_ORDER`, so ranks next to each other share tensors.

Does not: know which combinations a job can run; the job says so. Torch-free except for `mesh`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from .errors import TopologyError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DIMENSIONS = ("dp", "fsdp", "tp", "pp", "cp", "ep")
"""In the order of printing: replicated and fully sharded data, tensor, pipeline, context, expert
parallel. ``dp`` and ``fsdp`` together are HSDP: shards within, replicas across."""

MESH_ORDER = ("pp", "dp", "fsdp", "ep", "cp", "tp")
"""Outermost first, as in torchtitan: the ranks that talk most are neighbours."""

DATA_DIMENSIONS = ("dp", "fsdp", "ep")
"""Ranks that differ in one of these consume different samples."""

_PART = re.compile(r"([a-z]+)([1-9][0-9]*)")
_HYBRID = re.compile(r"hsdp([1-9][0-9]*)x([1-9][0-9]*)")


@dataclass(frozen=True)
class Topology:
    """Sizes by dimension, for example ``Topology((("dp", 2),))``; prints as ``dp2``.

    ``zero`` is the ZeRO stage of the optimizer's state over the ``dp`` ranks: 0, or 1 for
    ``zero1-dp2`` (every rank updates a part of the parameters).
    """

    sizes: tuple[tuple[str, int], ...]
    zero: int = 0

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Read ``dp2``, ``fsdp4``, ``hsdp2x2``, ``zero1-dp2``, ``dp2-tp2-pp1``.

        ``hsdp2x4`` is ``dp2-fsdp4``: 2 replicas, each in 4 shards.

        Raises:
            TopologyError: an unknown or repeated dimension, or a part that is not NAMEn.
        """
        sizes: dict[str, int] = {}
        zero = 0
        for part in text.split("-"):
            if part == "zero1" and not zero:
                zero = 1
                continue
            for name, size in _sizes_in(part, text):
                if name in sizes:
                    raise TopologyError(f"topology {text!r} names {name!r} twice")
                sizes[name] = size
        if zero and set(sizes) != {"dp"}:
            raise TopologyError(
                f"topology {text!r}: zero1 shares the optimizer's state among dp ranks alone; "
                "write for example 'zero1-dp2'"
            )
        return cls(tuple((name, sizes[name]) for name in DIMENSIONS if name in sizes), zero)

    def __str__(self) -> str:
        sizes = dict(self.sizes)
        parts = [f"zero{self.zero}"] if self.zero else []
        if "dp" in sizes and "fsdp" in sizes:
            parts.append(f"hsdp{sizes.pop('dp')}x{sizes.pop('fsdp')}")
        return "-".join([*parts, *(f"{name}{size}" for name, size in sizes.items())])

    @property
    def world_size(self) -> int:
        """The product of all dimensions."""
        return prod(size for _, size in self.sizes)

    @property
    def data_size(self) -> int:
        """How many parts a global batch is cut into."""
        return prod(self.size(name) for name in DATA_DIMENSIONS)

    def size(self, dimension: str) -> int:
        """The size of one dimension, 1 where the topology does not name it."""
        return dict(self.sizes).get(dimension, 1)

    def global_batch(self, *, micro_batch: int, accumulation: int) -> int:
        """Samples of one optimizer step: micro-batch x accumulation x data-parallel ranks."""
        return micro_batch * accumulation * self.data_size

    def require(self, world_size: int) -> None:
        """Raise `TopologyError` unless the dimensions multiply to ``world_size``."""
        if self.world_size != world_size:
            product = " x ".join(f"{name} {size}" for name, size in self.sizes)
            raise TopologyError(
                f"topology {self} needs {self.world_size} ranks ({product}), "
                f"but the job has {world_size}"
            )

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where ``rank`` sits along every dimension, in `MESH_ORDER`.

        Raises:
            TopologyError: the rank is none of this topology's.
        """
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"topology {self} has {self.world_size} ranks, and no rank {rank}")
        found: dict[str, int] = {}
        for name in reversed(MESH_ORDER):
            rank, found[name] = divmod(rank, self.size(name))
        return {name: found[name] for name in MESH_ORDER}

    def data_index(self, rank: int) -> int:
        """Which of the `data_size` parts of a global batch ``rank`` consumes."""
        index, coordinates = 0, self.coordinates(rank)
        for name in DATA_DIMENSIONS:
            index = index * self.size(name) + coordinates[name]
        return index

    def groups(self, *dimensions: str) -> tuple[tuple[int, ...], ...]:
        """The process groups along ``dimensions``: ranks that differ in nothing else, in order.

        Each rank is in exactly one; groups come in the order of their first rank.

        Raises:
            TopologyError: a name that is no dimension.
        """
        for name in dimensions:
            if name not in DIMENSIONS:
                raise TopologyError(f"{name!r} is not one of {', '.join(DIMENSIONS)}")
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            coordinates = self.coordinates(rank)
            fixed = tuple(at for name, at in coordinates.items() if name not in dimensions)
            members.setdefault(fixed, []).append(rank)
        return tuple(tuple(group) for group in members.values())

    def group(self, *dimensions: str, rank: int) -> tuple[int, ...]:
        """The group of `groups` that ``rank`` is in."""
        return next(group for group in self.groups(*dimensions) if rank in group)

    def mesh(self, device_type: str) -> DeviceMesh:
        """The mesh of the dimensions larger than 1, in `MESH_ORDER`; of ``dp`` if there is none.

        Creates process groups, so every rank calls it, in the same order as other collectives.
        """
        from torch.distributed.device_mesh import init_device_mesh

        names = tuple(name for name in MESH_ORDER if self.size(name) > 1) or ("dp",)
        sizes = tuple(self.size(name) for name in names)
        return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def _sizes_in(part: str, text: str) -> list[tuple[str, int]]:
    if hybrid := _HYBRID.fullmatch(part):
        return [("dp", int(hybrid[1])), ("fsdp", int(hybrid[2]))]
    match = _PART.fullmatch(part)
    if match is None or match[1] not in DIMENSIONS:
        raise TopologyError(
            f"topology {text!r}: {part!r} is not a dimension and its size; "
            f"write for example 'dp2-tp2', 'hsdp2x2' or 'zero1-dp2' with dimensions from "
            f"{', '.join(DIMENSIONS)}"
        )
    return [(match[1], int(match[2]))]
