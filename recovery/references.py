"""Whether the entries of a manifest fit together, whoever sealed it.

Guarantees, for a manifest that passes `check_references`: every rank has one shard and one object
file; every chunk lies in a shard behind its header, and has as many bytes as its elements need; the
chunks of a tensor cover it exactly, without gap or overlap; two chunks of a shard are apart, or are
the very same bytes with the same digest, under names of different tensors (tied weights). So what
is allocated for a tensor is at most what its files hold. Time is limited for any manifest.

Does not: look at files. Torch-free; called on writing and again on reading.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from .errors import ManifestError

if TYPE_CHECKING:
    from .manifest import Chunk, Manifest, TensorEntry

__all__ = ["ITEM_BYTES", "check_references"]

DIMENSIONS_MAX = 64
CORNERS_MAX = 1 << 25

ITEM_BYTES = {
    name: size
    for size, names in {
        1: "bool uint8 int8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
        "float8_e8m0fnu float4_e2m1fn_x2",
        2: "uint16 int16 float16 bfloat16",
        4: "uint32 int32 float32 complex32",
        8: "uint64 int64 float64 complex64",
        16: "complex128",
    }.items()
    for name in names.split()
}
"""Bytes of an element of each dtype that can be stored."""


def check_references(manifest: Manifest) -> None:
    """Raise `ManifestError` unless the entries of ``manifest`` fit together."""
    _check_files(manifest)
    if len({entry.name for entry in manifest.tensors}) != len(manifest.tensors):
        raise ManifestError("the manifest lists a tensor twice")
    shards = {entry.name: entry for entry in manifest.shards}
    held: dict[str, list[tuple[Chunk, TensorEntry]]] = {name: [] for name in shards}
    for tensor in manifest.tensors:
        item_bytes = ITEM_BYTES.get(tensor.dtype)
        if item_bytes is None:
            raise ManifestError(
                f"tensor {tensor.name!r} has dtype {tensor.dtype!r}, which this release cannot "
                f"store; known are {', '.join(sorted(ITEM_BYTES))}"
            )
        _check_cover(tensor)
        for chunk in tensor.chunks:
            shard = shards.get(chunk.file)
            if shard is None or not shard.header <= chunk.offset <= shard.size - chunk.length:
                raise ManifestError(
                    f"a chunk of tensor {tensor.name!r} lies outside of {chunk.file!r}"
                )
            if chunk.length != math.prod(chunk.sizes) * item_bytes:
                raise ManifestError(
                    f"a chunk of tensor {tensor.name!r} has {chunk.length} bytes for "
                    f"{math.prod(chunk.sizes)} elements of {tensor.dtype}"
                )
            held[chunk.file].append((chunk, tensor))
    for file, chunks in held.items():
        _check_apart(file, chunks)


def _check_files(manifest: Manifest) -> None:
    if not len(manifest.shards) == len(manifest.objects) == manifest.world_size > 0:
        raise ManifestError(
            f"the manifest lists {len(manifest.shards)} shards and {len(manifest.objects)} object "
            f"files of {manifest.world_size} ranks"
        )
    names = {entry.name for entry in manifest.shards} | {entry.name for entry in manifest.objects}
    if len(names) != 2 * manifest.world_size:
        raise ManifestError("the manifest lists a file twice")
    for shard in manifest.shards:
        if shard.header > shard.size:
            raise ManifestError(f"the header of {shard.name!r} is longer than the file")


def _check_cover(tensor: TensorEntry) -> None:
    """The chunks cover the tensor, each element once.

    A sum of boxes is one box exactly if the signed sum of their corners is: a corner counts
    positive with an even number of upper ends, else negative (the mixed derivative of an indicator
    function, from which the function follows).
    """
    shape, rank = tensor.shape, len(tensor.shape)
    if rank > DIMENSIONS_MAX:
        raise ManifestError(f"tensor {tensor.name!r} has {rank} dimensions")
    for chunk in tensor.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == rank or any(
            offset + size > end
            for offset, size, end in zip(chunk.offsets, chunk.sizes, shape, strict=True)
        ):
            raise ManifestError(f"a chunk of tensor {tensor.name!r} lies outside of its shape")
    if [chunk.sizes for chunk in tensor.chunks] == [shape] or (tensor.chunks and 0 in shape):
        return
    cut = [dim for dim in range(rank) if any(c.sizes[dim] != shape[dim] for c in tensor.chunks)]
    if len(tensor.chunks) << len(cut) > CORNERS_MAX:
        raise ManifestError(
            f"tensor {tensor.name!r} is cut into {len(tensor.chunks)} chunks along {len(cut)} "
            "dimensions, which is too much to be checked"
        )
    corners: dict[tuple[int, ...], int] = {}
    for chunk in tensor.chunks:
        _add_corners(corners, [(chunk.offsets[d], chunk.sizes[d]) for d in cut], 1)
    _add_corners(corners, [(0, shape[d]) for d in cut], -1)
    if not tensor.chunks or any(corners.values()):
        volume = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        raise ManifestError(
            f"the chunks of tensor {tensor.name!r} hold {volume} of its {math.prod(shape)} "
            "elements, or overlap"
        )


def _add_corners(
    corners: dict[tuple[int, ...], int], box: Sequence[tuple[int, int]], sign: int
) -> None:
    for ends in product((0, 1), repeat=len(box)):
        corner = tuple(start + end * size for (start, size), end in zip(box, ends, strict=True))
        corners[corner] = corners.get(corner, 0) + (-sign if sum(ends) % 2 else sign)


def _check_apart(file: str, chunks: list[tuple[Chunk, TensorEntry]]) -> None:
    chunks.sort(key=lambda held: (held[0].offset, held[0].length))
    tensors: set[str] = set()
    last: Chunk | None = None
    for chunk, tensor in chunks:
        if last is not None and (chunk.offset, chunk.length) == (last.offset, last.length):
            if chunk.digest != last.digest or (chunk.length and tensor.name in tensors):
                raise ManifestError(
                    f"bytes {chunk.offset} to {chunk.offset + chunk.length} of {file!r} are two "
                    f"different chunks, one of them of tensor {tensor.name!r}"
                )
        elif last is not None and chunk.offset < last.offset + last.length:
            raise ManifestError(
                f"chunks overlap in {file!r} at byte {chunk.offset}, tensor {tensor.name!r}"
            )
        else:
            tensors = set()
        tensors.add(tensor.name)
        last = chunk
