"""Where every element of this rank's tensors sits, and the two random keys of that place.

Guarantees: the keys of an element depend on the tensor's name, dtype and global shape and on the
element's global index alone, so shards cut in any way carry the keys of the whole tensor. Keys are
odd 64-bit numbers from SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014), held as int64.

For `seatrial.recovery.fingerprint` only.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .errors import StateError

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_KEPT_WORDS_MAX = 1 << 14  # with 1024 entries of 16 bytes a word, 256 MiB at the very most


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One rank's part of a logical tensor.

    ``replica`` names the copy that this part belongs to: the parts of one replica make up the whole
    tensor once. ``offset`` is where ``shape`` lies within ``global_shape``.
    """

    name: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    replica: str

    # Worked out once: a state is hashed after every step, and its layout hardly ever changes.

    @cached_property
    def count(self) -> int:
        """Elements on this rank."""
        return prod(self.shape)

    @cached_property
    def global_count(self) -> int:
        """Elements of the whole."""
        return prod(self.global_shape)

    @cached_property
    def words_each(self) -> int:
        """32-bit words of an element; a smaller one counts as one."""
        return max(1, self.dtype.itemsize // 4)

    @cached_property
    def words(self) -> int:
        """32-bit words on this rank."""
        return self.count * self.words_each

    @cached_property
    def kind(self) -> str:
        """The dtype's name, to sort by."""
        return str(self.dtype)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The values that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def layout_of(tensor: torch.Tensor) -> object:
    """What `place` depends on besides the name; equal layouts have equal placements."""
    if isinstance(tensor, DTensor):
        return tensor._spec
    return tensor.dtype, tensor.shape


def place(name: str, tensor: torch.Tensor, *, rank: int) -> Placement:
    """The placement of this rank's part of a tensor.

    Raises:
        StateError: a ``DTensor`` with pending reductions, or one whose shard has not the shape that
            its placements say.
    """
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        offset = (0,) * len(shape)
        replica = f"rank{rank}"
        return _placement(name, tensor, shape, shape, offset, replica)
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise StateError(
            f"{name} is a DTensor with a pending reduction ({tensor.placements}); "
            "only settled values are state"
        )
    local = local_part(tensor)
    whole = tuple(tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(
        whole, tensor.device_mesh, tensor.placements
    )
    if tuple(local.shape) != tuple(shape):
        raise StateError(
            f"{name}: rank {rank} holds a shard of shape {tuple(local.shape)}, "
            f"but {tensor.placements} of {whole} gives it {tuple(shape)}"
        )
    return _placement(name, tensor, whole, tuple(shape), tuple(offset), _replica(tensor))


def position_keys(placement: Placement, *, words: int, device: torch.device) -> torch.Tensor:
    """Keys of every word of the local part: int64 of shape ``[2, count * words]``, all odd.

    ``words`` is how many words one element has; a word's position is its element's global
    row-major index times ``words`` plus its place in the element. Small ones are kept for the life
    of the process, so that ranks forked from a process that made them need not make them again.
    """
    whole = replace(placement, replica="")  # copies have equal keys
    if device.type == "cpu" and placement.count * words <= _KEPT_WORDS_MAX:
        return _kept_keys(whole, words)
    return _make_keys(whole, words, device)


@lru_cache(maxsize=1024)
def _kept_keys(placement: Placement, words: int) -> torch.Tensor:
    return _make_keys(placement, words, torch.device("cpu"))


def _make_keys(placement: Placement, words: int, device: torch.device) -> torch.Tensor:
    index = torch.zeros((1,) * len(placement.shape), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(placement.shape))):
        along = torch.arange(placement.shape[dim], device=device) + placement.offset[dim]
        view = [1] * len(placement.shape)
        view[dim] = placement.shape[dim]
        index = index + (along * stride).reshape(view)
        stride *= placement.global_shape[dim]
    place_in_element = torch.arange(words, device=device)
    position = (index.reshape(-1, 1) * words + place_in_element).reshape(-1)
    seed_bytes = _name_digest(placement)
    lanes = [int.from_bytes(seed_bytes[:8], "little"), int.from_bytes(seed_bytes[8:], "little")]
    return torch.stack([_splitmix64(position, seed=seed) | 1 for seed in lanes])


def _placement(
    name: str,
    tensor: torch.Tensor,
    whole: tuple[int, ...],
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    replica: str,
) -> Placement:
    return Placement(
        name=name,
        dtype=tensor.dtype,
        global_shape=whole,
        shape=shape,
        offset=offset,
        replica=replica,
    )


def _replica(tensor: DTensor) -> str:
    mesh = tensor.device_mesh
    ranks = mesh.mesh.flatten().tolist()
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    copies = [
        f"{dim}:{coordinate[dim]}"
        for dim, placement in enumerate(tensor.placements)
        if isinstance(placement, Replicate)
    ]
    members = f"{ranks[0]}-{ranks[-1]}"
    if ranks != list(range(ranks[0], ranks[-1] + 1)):
        members = ",".join(map(str, ranks))
    return "/".join([f"mesh{members}", *copies])


def _name_digest(placement: Placement) -> bytes:
    # The dtype and shape count too: zeros of another dtype are another state.
    identity = repr((placement.name, str(placement.dtype), placement.global_shape))
    return hashlib.blake2b(identity.encode(), digest_size=16).digest()


def _splitmix64(position: torch.Tensor, *, seed: int) -> torch.Tensor:
    """The ``position``-th output of SplitMix64 seeded with ``seed``; int64 bits of a uint64."""
    z = (position + 1) * _signed(_GOLDEN) + _signed(seed)
    z = (z ^ _logical_shift(z, _SHIFTS[0])) * _signed(_MULTIPLIERS[0])
    z = (z ^ _logical_shift(z, _SHIFTS[1])) * _signed(_MULTIPLIERS[1])
    return z ^ _logical_shift(z, _SHIFTS[2])


def _logical_shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    # int64 shifts drag the sign along; without the mask z and ~z would collide.
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value
