"""What a training state is, in two 64-bit numbers per tensor that add up over shards.

Guarantees: the fingerprint of a tensor is, in two lanes modulo 2^64, the sum over its 32-bit words
of ``key(name, dtype, global shape, global position) * (word + 1)``. Keys are pseudorandom and odd,
so this is the multilinear hash of Carter and Wegman with 64-bit arithmetic over 32-bit words, as
in Lemire and Kaser, "Strongly universal string hashing is fast" (The Computer Journal 57, 2014):
two states that differ in one word never collide, and any two that differ otherwise collide with
probability below 2^-60 over the keys. Bits count, not values: -0.0 differs from 0.0, and NaN
payloads differ. Because it is a sum, the shards of a tensor add up to the fingerprint of the whole,
bitwise, whatever the topology; `seatrial.recovery.compare` does the adding, without torch.

Does not: communicate, change or copy the state elsewhere, or resist an adversary who picks the bits
(it is a check against accidents; files have digests).

Called on every rank after every step: about 2 ms for 105,000 elements in 112 tensors on one
thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby

import torch

from .checkpointable import Checkpointable
from .errors import StateError
from .plain import dumps
from .position_keys import Placement, layout_of, local_part, place, position_keys

_UINT64 = (1 << 64) - 1
_LARGE_WORDS = 1 << 20
"""Larger tensors are hashed alone, with keys made on the fly: kept keys take 16 bytes a word."""

TensorPart = tuple[int, int, int, int, str]
"""Lane 1, lane 2 (uint64), elements on this rank, elements in all, replica."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """One rank's part of a state's fingerprint; `seatrial.recovery.compare.combine` adds parts up.

    ``shared`` and ``own`` are BLAKE2b digests in hexadecimal of plain objects that are equal on
    every rank and that belong to this rank.
    """

    rank: int
    tensors: Mapping[str, TensorPart]
    shared: Mapping[str, str]
    own: Mapping[str, str]

    def to_json(self) -> dict[str, object]:
        """Plain JSON data, the form that a trace holds and that ``combine`` takes."""
        return {
            "rank": self.rank,
            "tensors": {name: list(part) for name, part in self.tensors.items()},
            "shared": dict(self.shared),
            "own": dict(self.own),
        }


@dataclass(kw_only=True)
class _Batch:
    """Small tensors of one device, hashed together, with memory that is used again each time.

    All int64: ``keys`` ``[2, words]``; ``words`` ``[words]``; ``running`` ``[words + 1]``, which
    begins with a zero and serves both lanes in turn; ``bounds`` ``[tensors + 1]``, where each
    begins.
    """

    placements: list[Placement]
    keys: torch.Tensor
    words: torch.Tensor
    running: torch.Tensor
    bounds: torch.Tensor
    base: list[tuple[int, int]]


@dataclass(kw_only=True)
class Fingerprinter:
    """Takes fingerprints of a state on one rank, keeping position keys from one to the next."""

    rank: int
    _batches: dict[torch.device, _Batch] = field(default_factory=dict, repr=False)
    _placed: dict[str, tuple[object, Placement]] = field(default_factory=dict, repr=False)

    def __call__(self, state: Checkpointable) -> Fingerprint:
        """The fingerprint of everything that ``state`` would save.

        Raises:
            StateError: a tensor whose bits cannot be read (sparse, quantized, partial), or an
                object that is not plain data.
        """
        return Fingerprint(
            rank=self.rank,
            tensors=self.tensors(state.tensors()),
            shared=_digests(state.shared_objects()),
            own=_digests(state.rank_objects()),
        )

    @torch.no_grad()
    def tensors(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorPart]:
        """The fingerprint of every tensor, in the order given."""
        small: dict[torch.device, list[tuple[Placement, torch.Tensor]]] = {}
        lanes: dict[str, tuple[int, int]] = {}
        placements: list[Placement] = []
        for name, tensor in tensors.items():
            placement, local = self._place(name, tensor)
            placements.append(placement)
            if placement.words > _LARGE_WORDS:
                lanes[name] = _hash_large(placement, local)
            else:
                small.setdefault(local.device, []).append((placement, local))
        for device, members in small.items():
            lanes |= self._hash_small(device, members)
        return {p.name: (*lanes[p.name], p.count, p.global_count, p.replica) for p in placements}

    def region(self, name: str) -> str:
        """Where this rank's part of ``name`` lies in the whole: offset, shape and global shape.

        Known after a fingerprint of it.
        """
        placement = self._placed[name][1]
        return f"{placement.offset} {placement.shape} {placement.global_shape}"

    def _place(self, name: str, tensor: torch.Tensor) -> tuple[Placement, torch.Tensor]:
        # Working a shard's offsets out takes longer than hashing it; layouts hardly ever change.
        layout = layout_of(tensor)
        known = self._placed.get(name)
        if known is not None and known[0] == layout:
            return known[1], local_part(tensor)
        placement = place(name, tensor, rank=self.rank)
        self._placed[name] = (layout, placement)
        return placement, local_part(tensor)

    def _hash_small(
        self, device: torch.device, members: list[tuple[Placement, torch.Tensor]]
    ) -> dict[str, tuple[int, int]]:
        # By dtype, so that one concatenation and one conversion serve all tensors of a dtype.
        members = sorted(members, key=lambda member: member[0].kind)
        placements = [placement for placement, _ in members]
        batch = self._batches.get(device)
        if batch is None or batch.placements != placements:
            batch = self._batches[device] = _plan(placements, device)
        filled = 0
        for _, group in groupby(members, key=lambda member: member[0].kind):
            parts = [_flat(local) for _, local in group]
            words = _as_words(parts[0] if len(parts) == 1 else torch.cat(parts))
            batch.words[filled : filled + len(words)] = words
            filled += len(words)
        sums = []
        running = batch.running[1:]
        for keys in batch.keys:
            torch.mul(keys, batch.words, out=running)
            # Prefix sums, not one sum per tensor: subtraction undoes addition exactly modulo 2^64.
            running.cumsum_(0)
            sums.append(batch.running[batch.bounds].diff().tolist())
        return {
            placement.name: ((first + a) & _UINT64, (second + b) & _UINT64)
            for placement, first, second, (a, b) in zip(placements, *sums, batch.base, strict=True)
        }


def fingerprint(state: Checkpointable, *, rank: int) -> Fingerprint:
    """One fingerprint of ``state``; for one every step keep a `Fingerprinter`."""
    return Fingerprinter(rank=rank)(state)


def _digests(objects: Mapping[str, object]) -> dict[str, str]:
    return {
        name: hashlib.blake2b(dumps(value, name=name), digest_size=16).hexdigest()
        for name, value in objects.items()
    }


def _plan(placements: list[Placement], device: torch.device) -> _Batch:
    keys = [
        position_keys(placement, words=placement.words_each, device=device)
        for placement in placements
    ]
    sizes = [part.shape[1] for part in keys]
    all_keys = torch.cat(keys, dim=1)
    count = all_keys.shape[1]
    return _Batch(
        placements=placements,
        keys=all_keys,
        words=all_keys.new_empty(count),
        running=all_keys.new_zeros(count + 1),
        bounds=torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0).to(device),
        # The sum of the keys is the "+ 1" of every word, so that zeros leave a trace.
        base=[_pair(part.sum(dim=1)) for part in keys],
    )


def _hash_large(placement: Placement, local: torch.Tensor) -> tuple[int, int]:
    """The same sum, over slices along the first dimension, so that keys never fill the memory."""
    words = placement.words_each
    flat = local.reshape(-1) if local.dim() == 0 else local
    row_words = max(1, placement.count * words // flat.shape[0])
    step = max(1, _LARGE_WORDS // row_words)
    total = (0, 0)
    for row in range(0, flat.shape[0], step):
        rows = flat[row : row + step]
        part = Placement(
            name=placement.name,
            dtype=placement.dtype,
            global_shape=placement.global_shape,
            shape=tuple(rows.shape),
            offset=(placement.offset[0] + row, *placement.offset[1:]),
            replica=placement.replica,
        )
        keys = position_keys(part, words=words, device=rows.device)
        values = _as_words(_flat(rows)).to(torch.int64) + 1
        first, second = _pair((keys * values).sum(dim=1))
        total = ((total[0] + first) & _UINT64, (total[1] + second) & _UINT64)
    return total


def _flat(local: torch.Tensor) -> torch.Tensor:
    if local.layout is not torch.strided or local.is_quantized:
        raise StateError(
            f"a {local.layout} tensor of {local.dtype} cannot be fingerprinted; "
            "only dense, unquantized tensors are state that a checkpoint can hold"
        )
    if local.is_complex():
        local = local.resolve_conj()
    flat = local.resolve_neg().reshape(-1)
    # Exotic 1-byte dtypes have no kernels to concatenate them.
    return flat.view(torch.uint8) if local.dtype.itemsize == 1 else flat


def _as_words(flat: torch.Tensor) -> torch.Tensor:
    """Signed words: sign extension to int64 keeps different bits different."""
    narrow = {1: torch.uint8, 2: torch.int16}.get(flat.dtype.itemsize, torch.int32)
    return flat.contiguous().view(narrow)


def _pair(sums: torch.Tensor) -> tuple[int, int]:
    first, second = sums.tolist()
    return first & _UINT64, second & _UINT64
