"""Reading stored tensors straight into live ones, whatever topology saved them.

Guarantees: every chunk that this rank uses is verified against its digest, as a whole, even where
only a part of it is needed; a chunk that is one run of bytes of a CPU tensor is read in place, with
no copy, and of others one for each thread is held. Several threads read one file. Dtypes and shapes
must be equal: nothing is cast.

Does not: keep the old values when it fails; a target is only meaningful once every rank agreed
that its reads succeeded. Called by the store.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from .files import fill_chunk, grouped, open_shard, reading, window
from .layout import Part, Region, as_carrier, torch_dtype
from .manifest import Chunk, Manifest, ShardEntry, TensorEntry
from .probe import around
from .storage.protocol import Files, Source
from .workers import reader_threads, run_all
from .writer import tensor_bytes

__all__ = ["mismatches", "read_parts"]

# Below this a whole file is read by the calling thread.
_ALONE_BYTES = 8 << 20


def mismatches(manifest: Manifest, parts: Sequence[Part]) -> list[str]:
    """Why ``parts`` cannot hold what is stored under their names, in words: other dtypes or shapes,
    or memory that several of their elements, or two of them, share."""
    stored = {entry.name: entry for entry in manifest.tensors}
    found = []
    places: dict[Hashable, TensorEntry] = {}
    for part in parts:
        region, entry = part.region, stored.get(part.region.name)
        if entry is not None and (entry.dtype, entry.shape) != (region.dtype, region.shape):
            found.append(
                f"{region.name} is {entry.dtype}{list(entry.shape)} in the checkpoint and "
                f"{region.dtype}{list(region.shape)} here"
            )
        elif entry is not None and _overlaps_itself(part.tensor):
            found.append(
                f"{region.name} shows one place of memory as several elements here, as expand() "
                "does; clone it"
            )
        elif entry is not None:
            tied = places.setdefault(_place(part), entry)
            if _differ(tied, entry):
                found.append(
                    f"{tied.name} and {region.name} are one tensor here, and hold other values in "
                    "the checkpoint"
                )
    return found


def _place(part: Part) -> Hashable:
    """Equal for parts that are one tensor under two names; no other's for an empty one."""
    tensor, region = part.tensor, part.region
    if tensor.numel() == 0:
        return region
    memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    return (*memory, tensor.is_conj(), tensor.is_neg(), region.offsets)


def _differ(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether digests show that two tensors, cut alike, hold other bytes."""
    if one is other or one.chunks == other.chunks or len(one.chunks) != len(other.chunks):
        return False
    cuts = sorted((c.offsets, c.sizes, c.digest) for c in one.chunks)
    others = sorted((c.offsets, c.sizes, c.digest) for c in other.chunks)
    are_alike = all(a[:2] == b[:2] for a, b in zip(cuts, others, strict=True))
    return one.dtype == other.dtype and are_alike and cuts != others


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory, so that one would be read over another."""
    end = 0  # of what the dimensions so far span, in elements
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= end:
                return True
            end += stride * (size - 1)
    return False


def read_parts(files: Files, manifest: Manifest, parts: Sequence[Part]) -> None:
    """Fill ``parts``, in which `mismatches` found nothing, from the attempt's ``files``.

    Announces ``restore/shard/read`` around each file.

    Raises:
        DamagedCheckpointError: a file or chunk is missing, short, changed or unreadable.
    """
    stored = {entry.name: entry for entry in manifest.tensors}
    wanted: dict[str, list[tuple[Chunk, Part]]] = {}
    for part in parts:
        entry: TensorEntry = stored[part.region.name]
        for chunk in entry.chunks:
            if part.region.overlap(chunk) is not None:
                wanted.setdefault(chunk.file, []).append((chunk, part))
    for shard in manifest.shards:
        if shard.name in wanted:
            chunks = sorted(wanted[shard.name], key=lambda item: item[0].offset)
            reading(files, shard.name, partial(_read_shard, files, shard, chunks, manifest.step))


def _read_shard(
    files: Files, shard: ShardEntry, chunks: Sequence[tuple[Chunk, Part]], step: int
) -> None:
    path = files.path(shard.name)
    alone = sum(chunk.length for chunk, _ in chunks) <= _ALONE_BYTES
    with (
        around("restore/shard/read", step=step, file=path),
        open_shard(files, shard) as source,
    ):
        run_all(
            partial(_read_group, source, path),
            grouped(source, chunks, lambda item: item[0]),
            threads=1 if alone else source.threads or reader_threads(),
        )


def _read_group(source: Source, path: str, group: Sequence[tuple[Chunk, Part]]) -> None:
    near = window(source, [chunk for chunk, _ in group])
    for wanted in group:
        _read_chunk(near, path, wanted)


def _read_chunk(source: Source, path: str, wanted: tuple[Chunk, Part]) -> None:
    chunk, part = wanted
    target = _in_place(chunk, part)
    if target is not None:
        fill_chunk(source, chunk, part.region.name, path, target)
    else:
        buffer = bytearray(chunk.length)
        fill_chunk(source, chunk, part.region.name, path, memoryview(buffer))
        _copy_overlap(buffer, chunk, part)


def _in_place(chunk: Chunk, part: Part) -> memoryview | None:
    """The bytes of the live tensor that ``chunk`` holds, if they are one run in memory."""
    tensor, region = part.tensor, part.region
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return None
    if (chunk.offsets, chunk.sizes) != (region.offsets, region.sizes):
        if region.overlap(chunk) != (chunk.offsets, chunk.sizes):
            return None
        tensor = region.narrow(tensor, chunk)
    return tensor_bytes(tensor) if tensor.is_contiguous() else None


def _copy_overlap(buffer: bytearray, chunk: Chunk, part: Part) -> None:
    overlap = part.region.overlap(chunk)
    assert overlap is not None
    held = Region(part.region.name, part.region.dtype, part.region.shape, *overlap)
    raw = torch.frombuffer(buffer, dtype=torch.uint8)
    stored = raw.view(torch_dtype(part.region.dtype)).reshape(chunk.sizes)
    source = replace(held, offsets=chunk.offsets, sizes=chunk.sizes).narrow(stored, held)
    target = part.region.narrow(part.tensor, held)
    if target.device.type != "cpu" or target.is_conj() or target.is_neg():
        target.copy_(source)
    else:
        # By NumPy: torch would start a pool of threads for each thread that copies.
        np.copyto(as_carrier(target).numpy(), as_carrier(source).numpy())
