"""Which part of each logical tensor this rank holds, and which rank stores each distinct part.

Guarantees: every distinct part is stored exactly once, by a rank that holds it, with the bytes
balanced over the ranks; parts that overlap or leave a gap, and ranks that disagree on a dtype or a
shape, are refused by name. Placements `Shard`, `_StridedShard` and `Replicate` are understood.

Does not: look at values, or check that ranks that hold the same part hold equal bits (they must).
Called by the store; works without a process group on plain tensors.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from .digest import digest
from .errors import StateError
from .manifest import Chunk

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "CHUNK_BYTES",
    "Part",
    "Region",
    "as_carrier",
    "assign",
    "decode_layout",
    "encode_layout",
    "local_parts",
    "split",
]

CHUNK_BYTES = 16 << 20
"""A part is stored in chunks of at most this size, each with a digest of its own: they are written
and read by several threads, and a rank that needs a piece of a part reads little more than it."""


@dataclass(frozen=True)
class Region:
    """A rectangle of a logical tensor; ``dtype`` as in `TensorEntry`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def size_bytes(self) -> int:
        return self.elements * torch_dtype(self.dtype).itemsize

    def narrow(self, tensor: torch.Tensor, part: Region | Chunk) -> torch.Tensor:
        """The view of ``part`` in ``tensor``, which holds this region."""
        if part.sizes == self.sizes:
            return tensor
        for dim, (start, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
            if size != self.sizes[dim]:
                tensor = tensor.narrow(dim, start - self.offsets[dim], size)
        return tensor

    def overlap(self, other: Region | Chunk) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Global offsets and sizes of what both hold, or None."""
        low = tuple(map(max, self.offsets, other.offsets))
        high = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        if any(end <= start for start, end in zip(low, high, strict=True)):
            return None
        return low, tuple(end - start for start, end in zip(low, high, strict=True))


@dataclass(frozen=True)
class Part:
    """A region and the live local tensor that holds it."""

    region: Region
    tensor: torch.Tensor


def split(region: Region, chunk_bytes: int) -> list[Region]:
    """Pieces of at most ``chunk_bytes`` (one element is never cut), in the order of their bytes.

    Each piece is one run of bytes of the region in row-major order, so the pieces, one after the
    other, are the region.
    """
    itemsize = torch_dtype(region.dtype).itemsize
    if region.elements * itemsize <= chunk_bytes or not region.sizes:
        return [region]
    # Rows of the first dimension whose rows fit; every dimension before it is cut one by one.
    dim, last = 0, len(region.sizes) - 1
    while dim < last and math.prod(region.sizes[dim + 1 :]) * itemsize > chunk_bytes:
        dim += 1
    rows = max(1, chunk_bytes // (math.prod(region.sizes[dim + 1 :]) * itemsize))
    cuts = [range(size) for size in region.sizes[:dim]] + [range(0, region.sizes[dim], rows)]
    pieces = []
    for starts in itertools.product(*cuts):
        sizes = [1] * dim + [min(rows, region.sizes[dim] - starts[dim]), *region.sizes[dim + 1 :]]
        offsets = [start + first for start, first in zip(starts, region.offsets, strict=False)]
        offsets += region.offsets[dim + 1 :]
        pieces.append(replace(region, offsets=tuple(offsets), sizes=tuple(sizes)))
    return pieces


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The inverse of `dtype_name`; raises `StateError` for what this torch does not know."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StateError(f"dtype {name!r} is not known to torch {torch.__version__}")
    return dtype


# Types of the same width that NumPy knows, by bytes of an element.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def as_carrier(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory under a dtype of equal width that every library can copy bit by bit.

    Not for a tensor that is conjugated or negated lazily: its memory holds other bits.
    """
    return tensor.view(_CARRIERS[tensor.dtype.itemsize])


def local_parts(tensors: Mapping[str, torch.Tensor]) -> list[Part]:
    """This rank's non-empty parts, in the order of ``tensors``; no bytes are copied.

    Raises:
        StateError: a tensor whose bytes cannot be taken apart (sparse, quantized, meta, a pending
            reduction), or a name that the shard format reserves.
    """
    places: _Places = {}
    with torch.no_grad():  # to_local is then free
        parts = [_part(name, tensor, places) for name, tensor in tensors.items()]
    return [part for part in parts if part is not None]


# Global shape, mesh and placements of a DTensor -> sizes and offsets of this rank's part.
_Places = dict[tuple[object, ...], tuple[tuple[int, ...], tuple[int, ...]]]


def _part(name: str, tensor: torch.Tensor, places: _Places) -> Part | None:
    if not isinstance(name, str) or not name or name == "__metadata__":
        raise StateError(f"{name!r} cannot be the name of a stored tensor")
    if not isinstance(tensor, torch.Tensor):
        raise StateError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    shape = tuple(tensor.shape)
    if _is_dtensor(tensor):
        held = _of_dtensor(name, tensor, places)
        if held is None:
            return None
        local, offsets = held
    else:
        local, offsets = tensor.detach(), (0,) * len(shape)
    if local.layout is not torch.strided or local.is_quantized or local.is_meta:
        raise StateError(
            f"tensor {name!r} is sparse, quantized or on the meta device and has no plain bytes; "
            "store its parts as dense tensors"
        )
    if local.numel() == 0 and math.prod(shape) != 0:
        return None
    if local.numel() == 0:
        local, offsets = local.new_empty(shape), (0,) * len(shape)
    return Part(
        Region(name, dtype_name(tensor.dtype), shape, tuple(offsets), tuple(local.shape)), local
    )


def _is_dtensor(tensor: torch.Tensor) -> bool:
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _of_dtensor(
    name: str, tensor: torch.Tensor, places: _Places
) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.get_coordinate() is None:
        return None
    if any(placement.is_partial() for placement in placements):
        raise StateError(
            f"tensor {name!r} is a pending reduction ({placements}); redistribute it before saving"
        )
    key = (tensor.shape, mesh, placements)
    if key not in places:
        places[key] = _place(name, tensor)
    sizes, offsets = places[key]
    local = tensor.to_local().detach()
    if tuple(local.shape) != sizes:
        raise StateError(
            f"tensor {name!r} holds {tuple(local.shape)} on this rank where its placements "
            f"{placements} give {sizes}; its dimensions must divide evenly over the mesh"
        )
    return local, offsets


def _place(name: str, tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and offsets of this rank's part; slow, and equal for tensors that are placed alike."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if math.prod(sizes) and not all(
        _is_run(tensor, dim, offsets[dim], sizes[dim]) for dim in range(tensor.ndim)
    ):
        raise StateError(
            f"tensor {name!r} with placements {tensor.placements} is not one rectangle on this "
            "rank; its dimensions must divide evenly over the mesh"
        )
    return tuple(sizes), tuple(offsets)


def _is_run(tensor: DTensor, dim: int, offset: int, size: int) -> bool:
    """Whether this rank's indices of ``dim`` are consecutive; a strided shard's need not be."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if not any(isinstance(p, _StridedShard) and p.dim == dim for p in tensor.placements):
        return True
    held = torch.arange(tensor.shape[dim])
    coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim:
            along = (
                type(placement)(0, split_factor=placement.split_factor)
                if isinstance(placement, _StridedShard)
                else Shard(0)
            )
            pieces, _ = along._split_tensor(
                held, tensor.device_mesh.size(mesh_dim), with_padding=False
            )
            held = pieces[coordinate[mesh_dim]]
    return held.tolist() == list(range(offset, offset + size))


def encode_layout(parts: Sequence[Part]) -> tuple[bytes, str]:
    """The regions as JSON, and a digest that is equal where the layout is."""
    regions = (part.region for part in parts)
    fields = [[r.name, r.dtype, r.shape, r.offsets, r.sizes] for r in regions]
    data = json.dumps(fields, separators=(",", ":")).encode()
    return data, digest(data)


def decode_layout(data: bytes | str) -> list[Region]:
    """The regions that `encode_layout` encoded."""
    return [
        Region(name, dtype, tuple(shape), tuple(offsets), tuple(sizes))
        for name, dtype, shape, offsets, sizes in json.loads(data)
    ]


def assign(layouts: Sequence[Sequence[Region]]) -> list[list[int]]:
    """For each rank, the indices into its layout of the regions that it stores.

    Largest first, each to the holder with the fewest bytes so far, the lowest rank on a tie. The
    indices are in the order in which the rank shall write them.

    Raises:
        StateError: the ranks disagree on a tensor, or the parts do not add up to it.
    """
    holders: dict[Region, list[tuple[int, int]]] = {}
    for rank, layout in enumerate(layouts):
        for index, region in enumerate(layout):
            holders.setdefault(region, []).append((rank, index))
    _check_whole(holders)
    load_bytes = [0] * len(layouts)
    chosen: list[list[int]] = [[] for _ in layouts]
    for region in sorted(holders, key=lambda region: -region.size_bytes):
        rank, index = min(holders[region], key=lambda holder: (load_bytes[holder[0]], holder))
        load_bytes[rank] += region.size_bytes
        chosen[rank].append(index)
    # Widest elements first, so that every tensor in a shard file is aligned to its element.
    return [
        sorted(indices, key=lambda index: (-torch_dtype(layout[index].dtype).itemsize, index))
        for layout, indices in zip(layouts, chosen, strict=True)
    ]


def _check_whole(holders: Mapping[Region, Sequence[tuple[int, int]]]) -> None:
    tensors: dict[str, list[Region]] = {}
    for region in holders:
        tensors.setdefault(region.name, []).append(region)
    for name, regions in tensors.items():
        first = regions[0]
        for region in regions:
            if (region.dtype, region.shape) != (first.dtype, first.shape):
                raise StateError(
                    f"tensor {name!r} is {first.dtype}{list(first.shape)} on rank "
                    f"{holders[first][0][0]} and {region.dtype}{list(region.shape)} on rank "
                    f"{holders[region][0][0]}; the ranks must agree"
                )
        held = sum(region.elements for region in regions)
        if held != math.prod(first.shape) or _any_overlap(regions):
            raise StateError(
                f"the ranks' parts of tensor {name!r} hold {held} elements of "
                f"{math.prod(first.shape)}, or overlap; a tensor must be whole on each rank or "
                "sharded evenly over all"
            )


def _any_overlap(regions: list[Region]) -> bool:
    if len(regions) == 1:
        return False
    # Sweep along the dimension with the most cuts, so that few regions are compared at a time.
    dims = range(len(regions[0].shape))
    dim = max(dims, key=lambda dim: len({region.offsets[dim] for region in regions}))
    active: list[Region] = []
    for region in sorted(regions, key=lambda region: region.offsets[dim]):
        active = [a for a in active if a.offsets[dim] + a.sizes[dim] > region.offsets[dim]]
        if any(region.overlap(other) for other in active):
            return True
        active.append(region)
    return False
