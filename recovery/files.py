"""Reading a checkpoint's files with every byte verified.

Guarantees: no symlink in place of a file or of its directory is followed, and only regular files
are opened; what is returned or filled in matches its digest and its file has the size that the
manifest states, which is checked before memory is allocated; missing, short, changed and unreadable
files raise `DamagedCheckpointError` that names the file. Transient errors are retried. Other
failures of the storage (permission, too many open files, a stale mount) stay
`OSError`: they say nothing about the checkpoint.

Does not: write anything, or decode what it reads. Torch-free; called by the reader and `inspect`.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from .digest import Digest, algorithm_of, digest
from .errors import DamagedCheckpointError
from .manifest import Chunk, FileEntry, Manifest, ShardEntry
from .publish import open_directory, open_regular

__all__ = ["file_problems", "fill_chunk", "open_shard", "read_file", "retried"]

# A piece is still in the processor's cache when it is digested.
PIECE_BYTES = 256 << 10
ATTEMPTS = 3
RETRY_PAUSE_S = 0.02

_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO)
_UNREADABLE = (errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO))
_T = TypeVar("_T")


def retried(use: Callable[[], _T], path: Path) -> _T:
    """What ``use`` returns, tried again after an `OSError`; an unreadable file is damage."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return use()
        except OSError as error:
            if error.errno in _MISSING:
                raise DamagedCheckpointError(f"{path} is missing: {error.strerror}") from error
            if attempt < ATTEMPTS:
                time.sleep(RETRY_PAUSE_S * attempt)
            elif error.errno in _UNREADABLE:
                raise DamagedCheckpointError(f"{path} is unreadable: {error}") from error
            else:
                raise
    raise AssertionError("unreachable")


@contextmanager
def _open(path: Path, size: int) -> Iterator[int]:
    with open_directory(path.parent) as directory:
        file = open_regular(directory, path.name)
    try:
        found = os.fstat(file).st_size
        if found != size:
            raise DamagedCheckpointError(f"{path} has {found} bytes where {size} were stored")
        yield file
    finally:
        os.close(file)


def read_file(directory: Path, entry: FileEntry) -> bytes:
    """The verified content of a file that is digested as a whole."""
    path = directory / entry.name
    with _open(path, entry.size) as file:
        content = bytearray(entry.size)
        _read_into(file, memoryview(content), 0, path)
    if digest(content, algorithm_of(entry.digest)) != entry.digest:
        raise DamagedCheckpointError(f"{path} does not match its digest")
    return bytes(content)


@contextmanager
def open_shard(directory: Path, entry: ShardEntry) -> Iterator[int]:
    """A descriptor of the shard file, its size and its header verified."""
    path = directory / entry.name
    with _open(path, entry.size) as file:
        header = bytearray(entry.header)
        _read_into(file, memoryview(header), 0, path)
        if digest(header, algorithm_of(entry.digest)) != entry.digest:
            raise DamagedCheckpointError(f"the header of {path} does not match its digest")
        yield file


def fill_chunk(file: int, chunk: Chunk, tensor: str, path: Path, target: memoryview) -> None:
    """Read ``chunk`` into ``target``, of exactly its length; the digest is checked afterwards.

    Several threads may fill chunks from one ``file``.
    """
    running = Digest(algorithm_of(chunk.digest))
    for start in range(0, chunk.length, PIECE_BYTES):
        piece = target[start : start + PIECE_BYTES]
        _read_into(file, piece, chunk.offset + start, path)
        running.update(piece)
    if running.text() != chunk.digest:
        raise DamagedCheckpointError(
            f"{path} does not match its digest at bytes {chunk.offset} to "
            f"{chunk.offset + chunk.length}, tensor {tensor!r}"
        )


def _read_into(file: int, target: memoryview, offset: int, path: Path) -> None:
    done = 0
    while done < len(target):
        count = os.preadv(file, [target[done:]], offset + done)
        if count == 0:
            raise DamagedCheckpointError(f"{path} ends at byte {offset + done}")
        done += count


def file_problems(
    directory: Path, manifest: Manifest, *, progress: Callable[[int], object] = lambda done: None
) -> list[str]:
    """Every file and chunk of the manifest that is missing, short, changed or unreadable.

    ``progress`` is told how many bytes have been checked since it was last called.
    """
    problems: list[str] = []
    # Tied tensors share their chunks, which are read once.
    chunks: dict[str, dict[tuple[int, int], tuple[Chunk, str]]] = {
        entry.name: {} for entry in manifest.shards
    }
    for tensor in manifest.tensors:
        for chunk in tensor.chunks:
            chunks[chunk.file].setdefault((chunk.offset, chunk.length), (chunk, tensor.name))
    for shard in manifest.shards:
        path = directory / shard.name
        held = sorted(
            chunks[shard.name].values(), key=lambda item: (item[0].offset, item[0].length)
        )
        try:
            problems += retried(partial(_shard_problems, directory, shard, held, progress), path)
        except (DamagedCheckpointError, OSError) as error:
            problems.append(str(error))
    for entry in manifest.objects:
        try:
            retried(partial(read_file, directory, entry), directory / entry.name)
            progress(entry.size)
        except (DamagedCheckpointError, OSError) as error:
            problems.append(str(error))
    return problems


def _shard_problems(
    directory: Path,
    shard: ShardEntry,
    held: list[tuple[Chunk, str]],
    progress: Callable[[int], object],
) -> list[str]:
    problems = []
    end = shard.header
    with open_shard(directory, shard) as file:
        for chunk, tensor in held:
            buffer = memoryview(bytearray(chunk.length))
            try:
                fill_chunk(file, chunk, tensor, directory / shard.name, buffer)
            except DamagedCheckpointError as error:
                problems.append(str(error))
            if chunk.offset != end:
                problems.append(f"{directory / shard.name} has bytes without a digest at {end}")
            end = chunk.offset + chunk.length
            progress(chunk.length)
    if end != shard.size:
        problems.append(f"{directory / shard.name} has bytes without a digest at {end}")
    return problems
