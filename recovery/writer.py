"""Writing one rank's files: tensors in the safetensors format, plain data as JSON.

The format is that of the safetensors library (8 bytes little-endian header length, a JSON header,
raw little-endian bytes, no gaps) and any safetensors reader opens the files. They are written here
and not by that library because each chunk is digested on its way to the file, and because that
library neither fsyncs nor reports where a chunk lies. What safetensors has no dtype for (complex,
some float8) is stored as U8; the true dtype and shape are in the manifest.

Where the storage allows it, several threads write one file, each at its own places: while one waits
for the kernel, another digests, and the disk begins to write what it was given at once. An object
is written in order.

Guarantees: on return the file's content is durable and its digests are those of the bytes that were
meant to be written, taken from memory and never from the file. An existing file is never opened.
An error in any thread is raised here, after all of them have stopped. The directory's entry is not
durable until the directory is fsynced (`Files.fsync`).

Does not: copy tensors whose bytes lie in memory as they are stored; of others, one chunk for each
thread. Publish, or retry. Called by the store.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from .digest import DEFAULT, Digest, digest
from .errors import StateError
from .layout import Part, Region, as_carrier, split
from .manifest import Chunk, FileEntry, ShardEntry
from .probe import around
from .storage.protocol import Files, Sink
from .workers import run_all, writer_threads

__all__ = ["write_object_file", "write_shard_file"]

HEADER_ALIGNMENT_BYTES = 8
# Small chunks share one write until they are this long.
_BATCH_BYTES = 1 << 20
# A piece is digested, then written while it is in the processor's cache.
_PIECE_BYTES = 1 << 20
# Below this the whole file is written by the calling thread.
_ALONE_BYTES = 8 << 20
_UNCUT = sys.maxsize

# Only what every safetensors release since 0.3 reads; the rest is stored as U8.
_SAFETENSORS_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


@dataclass
class _Source:
    """One chunk to write: where, and the live tensor that has its elements."""

    region: Region
    tensor: torch.Tensor
    offset: int
    digest: str = ""

    @property
    def length(self) -> int:
        return self.region.size_bytes


def write_shard_file(
    files: Files,
    name: str,
    parts: Sequence[Part],
    *,
    step: int,
    chunk_bytes: int = _UNCUT,
    algorithm: str = DEFAULT,
) -> tuple[ShardEntry, list[Chunk]]:
    """Write ``parts`` to the new file ``name``, durably.

    Announces ``checkpoint/shard/write`` and, where the storage has that step,
    ``checkpoint/shard/fsync``, in the calling thread.

    Returns:
        The file's entry, and the chunks in order: one for each piece that `layout.split` makes of a
        part, so one for each part if ``chunk_bytes`` is left out.
    """
    if sys.byteorder != "little":
        raise StateError("shards hold little-endian bytes, and this machine is big-endian")
    header = _header(parts)
    sources = _sources(parts, len(header), chunk_bytes)
    size = sources[-1].offset + sources[-1].length if sources else len(header)
    with files.create(name, size) as sink:
        with around("checkpoint/shard/write", step=step, file=files.path(name)):
            _write_file(sink, header, sources, size, algorithm)
            sink.finish()
        _fsync(sink, files.path(name), step)
    entry = ShardEntry(name=name, size=size, header=len(header), digest=digest(header, algorithm))
    return entry, [
        Chunk(
            file=name,
            offset=source.offset,
            length=source.length,
            digest=source.digest,
            offsets=source.region.offsets,
            sizes=source.region.sizes,
        )
        for source in sources
    ]


def write_object_file(
    files: Files, name: str, content: bytes, *, step: int, algorithm: str = DEFAULT
) -> FileEntry:
    """Write ``content`` to the new file ``name``, durably; announces as shards do."""
    with files.create(name, len(content)) as sink:
        with around("checkpoint/shard/write", step=step, file=files.path(name)):
            sink.write_at(content, 0)
            sink.finish()
        _fsync(sink, files.path(name), step)
    return FileEntry(name=name, size=len(content), digest=digest(content, algorithm))


def _fsync(sink: Sink, path: str, step: int) -> None:
    if sink.fsyncs:
        with around("checkpoint/shard/fsync", step=step, file=path):
            sink.fsync()


def _header(parts: Sequence[Part]) -> bytes:
    """The safetensors header: each part is one tensor, however many chunks it has."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for part in parts:
        region, length = part.region, part.region.size_bytes
        dtype = _SAFETENSORS_DTYPES.get(part.tensor.dtype)
        described[region.name] = {
            "dtype": dtype or "U8",
            "shape": region.sizes if dtype else (length,),
            "data_offsets": (start, start + length),
        }
        start += length
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _sources(parts: Sequence[Part], start: int, chunk_bytes: int) -> list[_Source]:
    sources = []
    for part in parts:
        for region in split(part.region, chunk_bytes):
            sources.append(_Source(region, part.region.narrow(part.tensor, region), start))
            start += region.size_bytes
    return sources


def _write_file(
    sink: Sink, header: bytes, sources: Sequence[_Source], size: int, algorithm: str
) -> None:
    sink.write_at(header, 0)
    run_all(
        partial(_write_batch, sink, algorithm),
        list(_batches(sources)),
        threads=1 if size <= _ALONE_BYTES else sink.threads or writer_threads(),
    )


def _batches(sources: Sequence[_Source]) -> Iterator[list[_Source]]:
    """Neighbours whose bytes together fit into one write; a longer chunk is by itself."""
    batch: list[_Source] = []
    length = 0
    for source in sources:
        if batch and length + source.length > _BATCH_BYTES:
            yield batch
            batch, length = [], 0
        batch.append(source)
        length += source.length
    if batch:
        yield batch


def _write_batch(sink: Sink, algorithm: str, batch: list[_Source]) -> None:
    if len(batch) == 1:
        _write_digesting(sink, batch[0], algorithm)
        return
    pending = bytearray()
    for source in batch:
        content = tensor_bytes(source.tensor)
        source.digest = digest(content, algorithm)
        pending += content
    sink.write_at(pending, batch[0].offset)


def _write_digesting(sink: Sink, source: _Source, algorithm: str) -> None:
    content = tensor_bytes(source.tensor)
    running = Digest(algorithm)
    offset = source.offset
    # Cut where the file's blocks begin, so that no block but the first and the last is half done.
    first = min(len(content), _PIECE_BYTES - offset % _PIECE_BYTES)
    cuts = [0, *range(first, len(content), _PIECE_BYTES), len(content)]
    for start, end in itertools.pairwise(cuts):
        piece = content[start:end]
        running.update(piece)
        sink.write_at(piece, offset + start)
    source.digest = running.text()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements in row-major order as bytes; a view where the tensor allows it.

    A copy is made by NumPy, in this thread: torch would start a pool of threads for each thread
    that copies.
    """
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu")
    if not plain.is_contiguous():
        copied = np.ascontiguousarray(as_carrier(plain).numpy())
        return copied.reshape(-1).view(np.uint8).data
    return plain.reshape(-1).view(torch.uint8).numpy().data
