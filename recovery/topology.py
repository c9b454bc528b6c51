"""How many ranks hold which part: the topology of a job as one value that prints and parses.

Guarantees: ``str(Topology.parse(text))`` names the same topology; the product of the dimensions is
checked against a world size by `require`. Does not make process groups or meshes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from .errors import TopologyError

DIMENSIONS = ("dp", "fsdp", "tp", "pp", "cp", "ep")
"""In mesh order: replicated and fully sharded data, tensor, pipeline, context, expert parallel."""

_PART = re.compile(r"([a-z]+)([1-9][0-9]*)")


@dataclass(frozen=True)
class Topology:
    """Sizes by dimension, for example ``Topology((("dp", 2),))``; prints as ``dp2``."""

    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Read ``dp2``, ``fsdp4``, ``dp2-tp2-pp1``.

        Raises:
            TopologyError: an unknown or repeated dimension, or a part that is not NAMEn.
        """
        sizes: dict[str, int] = {}
        for part in text.split("-"):
            match = _PART.fullmatch(part)
            if match is None or match[1] not in DIMENSIONS:
                raise TopologyError(
                    f"topology {text!r}: {part!r} is not a dimension and its size; "
                    f"write for example 'dp2-tp2' with dimensions from {', '.join(DIMENSIONS)}"
                )
            if match[1] in sizes:
                raise TopologyError(f"topology {text!r} names {match[1]!r} twice")
            sizes[match[1]] = int(match[2])
        return cls(tuple((name, sizes[name]) for name in DIMENSIONS if name in sizes))

    def __str__(self) -> str:
        return "-".join(f"{name}{size}" for name, size in self.sizes)

    @property
    def world_size(self) -> int:
        """The product of all dimensions."""
        return prod(size for _, size in self.sizes)

    def size(self, dimension: str) -> int:
        """The size of one dimension, 1 where the topology does not name it."""
        return dict(self.sizes).get(dimension, 1)

    def require(self, world_size: int) -> None:
        """Raise `TopologyError` unless the dimensions multiply to ``world_size``."""
        if self.world_size != world_size:
            product = " x ".join(f"{name} {size}" for name, size in self.sizes)
            raise TopologyError(
                f"topology {self} needs {self.world_size} ranks ({product}), "
                f"but the job has {world_size}"
            )
