"""Reading stored tensors straight into live ones, whatever topology saved them.

Guarantees: every chunk that this rank uses is verified against its digest, as a whole, even where
only a part of it is needed; a chunk that is exactly a contiguous CPU tensor is read in place, with
no copy. Dtypes and shapes must be equal: nothing is cast.

Does not: keep the old values when it fails; a target is only meaningful once every rank agreed
that its reads succeeded. Called by the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from .files import fill_chunk, open_shard, retried
from .layout import Part, torch_dtype
from .manifest import Chunk, Manifest, ShardEntry, TensorEntry
from .probe import around
from .writer import tensor_bytes

__all__ = ["mismatches", "read_parts"]


def mismatches(manifest: Manifest, parts: Sequence[Part]) -> list[str]:
    """How the dtypes and shapes of ``parts`` differ from those that are stored, in words."""
    stored = {entry.name: entry for entry in manifest.tensors}
    found = []
    for part in parts:
        region, entry = part.region, stored.get(part.region.name)
        if entry is not None and (entry.dtype, entry.shape) != (region.dtype, region.shape):
            found.append(
                f"{region.name} is {entry.dtype}{list(entry.shape)} in the checkpoint and "
                f"{region.dtype}{list(region.shape)} here"
            )
    return found


def read_parts(directory: Path, manifest: Manifest, parts: Sequence[Part]) -> None:
    """Fill ``parts``, in which `mismatches` found nothing, from the files in ``directory``.

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
            read = partial(_read_shard, directory, shard, chunks, manifest.step)
            retried(read, directory / shard.name)


def _read_shard(
    directory: Path, shard: ShardEntry, chunks: Sequence[tuple[Chunk, Part]], step: int
) -> None:
    path = directory / shard.name
    with (
        around("restore/shard/read", step=step, file=str(path)),
        open_shard(directory, shard) as file,
    ):
        for chunk, part in chunks:
            if _is_in_place(chunk, part):
                fill_chunk(file, chunk, part.region.name, path, tensor_bytes(part.tensor))
            else:
                buffer = bytearray(chunk.length)
                fill_chunk(file, chunk, part.region.name, path, memoryview(buffer))
                _copy_overlap(buffer, chunk, part)


def _is_in_place(chunk: Chunk, part: Part) -> bool:
    tensor = part.tensor
    return (
        (chunk.offsets, chunk.sizes) == (part.region.offsets, part.region.sizes)
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _copy_overlap(buffer: bytearray, chunk: Chunk, part: Part) -> None:
    overlap = part.region.overlap(chunk)
    assert overlap is not None
    offsets, sizes = overlap
    raw = torch.frombuffer(buffer, dtype=torch.uint8)
    source = raw.view(torch_dtype(part.region.dtype)).reshape(chunk.sizes)
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        source = source.narrow(dim, offset - chunk.offsets[dim], size)
    target = part.tensor
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        target = target.narrow(dim, offset - part.region.offsets[dim], size)
    target.copy_(source)
