"""Writing one rank's files: tensors in the safetensors format, plain data as JSON.

The format is that of the safetensors library (8 bytes little-endian header length, a JSON header,
raw little-endian bytes, no gaps) and any safetensors reader opens the files. They are written here
and not by that library because each chunk is digested on its way to the file, and because that
library neither fsyncs nor reports where a chunk lies. What safetensors has no dtype for (complex,
some float8) is stored as U8; the true dtype and shape are in the manifest.

Guarantees: on return the file's content is durable and its digests are those of the bytes that were
meant to be written, taken from memory and never from the file. An existing file is never opened.
The directory's entry is not durable until the directory is fsynced (`publish.fsync_directory`).

Does not: hold more than one chunk besides the live tensors in memory, publish, or retry. Called by
the store.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from .digest import Digest, digest
from .errors import StateError
from .layout import Part
from .manifest import Chunk, FileEntry, ShardEntry
from .probe import around
from .publish import write_all

__all__ = ["write_object_file", "write_shard_file"]

HEADER_ALIGNMENT_BYTES = 8
_SMALL_BYTES = 256 << 10
_PIECE_BYTES = 8 << 20

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


def write_shard_file(
    path: Path, parts: Sequence[Part], *, step: int
) -> tuple[ShardEntry, list[Chunk]]:
    """Write ``parts`` to the new file ``path`` and fsync it.

    Announces ``checkpoint/shard/write`` and ``checkpoint/shard/fsync``.

    Returns:
        The file's entry and one chunk for each part, in order.
    """
    if sys.byteorder != "little":
        raise StateError("shards hold little-endian bytes, and this machine is big-endian")
    header, chunks = _plan(path.name, parts)
    size = chunks[-1].offset + chunks[-1].length if chunks else len(header)
    file = _create(path)
    try:
        with around("checkpoint/shard/write", step=step, file=str(path)):
            digests = list(_write_parts(file, header, parts))
            if os.fstat(file).st_size != size:
                raise OSError(f"{path} has {os.fstat(file).st_size} bytes instead of {size}")
        with around("checkpoint/shard/fsync", step=step, file=str(path)):
            os.fsync(file)
    finally:
        os.close(file)
    entry = ShardEntry(name=path.name, size=size, header=len(header), digest=digest(header))
    return entry, [replace(c, digest=d) for c, d in zip(chunks, digests, strict=True)]


def write_object_file(path: Path, content: bytes, *, step: int) -> FileEntry:
    """Write ``content`` to the new file ``path`` and fsync it; announces as shards do."""
    file = _create(path)
    try:
        with around("checkpoint/shard/write", step=step, file=str(path)):
            write_all(file, content)
        with around("checkpoint/shard/fsync", step=step, file=str(path)):
            os.fsync(file)
    finally:
        os.close(file)
    return FileEntry(name=path.name, size=len(content), digest=digest(content))


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o644)


def _plan(file: str, parts: Sequence[Part]) -> tuple[bytes, list[Chunk]]:
    """The safetensors header, and where each part will lie; digests come while writing."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    chunks: list[Chunk] = []
    start = 0
    for part in parts:
        region, length = part.region, part.region.size_bytes
        dtype = _SAFETENSORS_DTYPES.get(part.tensor.dtype)
        described[region.name] = {
            "dtype": dtype or "U8",
            "shape": region.sizes if dtype else (length,),
            "data_offsets": (start, start + length),
        }
        chunks.append(
            Chunk(
                file=file,
                offset=start,
                length=length,
                digest="",
                offsets=region.offsets,
                sizes=region.sizes,
            )
        )
        start += length
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT_BYTES)
    header = len(text).to_bytes(8, "little") + text
    return header, [replace(chunk, offset=chunk.offset + len(header)) for chunk in chunks]


def _write_parts(file: int, header: bytes, parts: Sequence[Part]) -> Iterator[str]:
    """Write everything and yield each part's digest; small parts share one write."""
    pending = bytearray(header)
    for part in parts:
        content = tensor_bytes(part.tensor)
        if len(content) <= _SMALL_BYTES:
            pending += content
            yield digest(content)
        else:
            write_all(file, pending)
            pending.clear()
            yield _write_digesting(file, content)
        if len(pending) >= _PIECE_BYTES:
            write_all(file, pending)
            pending.clear()
    write_all(file, pending)


def _write_digesting(file: int, content: memoryview) -> str:
    running = Digest()
    for start in range(0, len(content), _PIECE_BYTES):
        # Digested just before it is written, the piece is still in the processor's cache.
        piece = content[start : start + _PIECE_BYTES]
        running.update(piece)
        write_all(file, piece)
    return running.text()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements in row-major order as bytes; a view where the tensor allows it."""
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data
