"""Reading a checkpoint's files with every byte verified.

Guarantees: what is returned or filled in matches its digest and its file has the size that the
manifest states, which is checked before much memory is allocated; missing, short, changed and
unreadable files raise `DamagedCheckpointError` that names the file. Transient errors are tried
again, as `seatrial.recovery.storage.retry` says. Other failures of the storage (permission, a stale
mount, no network) stay `OSError`: they say nothing about the checkpoint.

Does not: write anything, or decode what it reads. Torch-free; called by the reader and `inspect`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from .digest import Digest, algorithm_of, digest
from .errors import DamagedCheckpointError
from .manifest import Chunk, FileEntry, Manifest, ShardEntry
from .storage.damage import named
from .storage.protocol import Files, Source
from .storage.retry import retried
from .workers import reader_threads, run_all

__all__ = [
    "file_problems",
    "fill_chunk",
    "grouped",
    "open_shard",
    "read_file",
    "reading",
    "window",
]

_T = TypeVar("_T")


def reading(files: Files, name: str, use: Callable[[], _T]) -> _T:
    """What ``use``, which reads the file ``name``, returns; again after a transient error."""
    with named(files.path(name)):
        return retried(use, files.retry)


def read_file(files: Files, entry: FileEntry) -> bytes:
    """The verified content of a file that is digested as a whole."""
    with files.open(entry.name, entry.size) as source:
        content = bytearray(entry.size)
        source.read_into(memoryview(content), 0)
    if digest(content, algorithm_of(entry.digest)) != entry.digest:
        raise DamagedCheckpointError(f"{files.path(entry.name)} does not match its digest")
    return bytes(content)


@contextmanager
def open_shard(files: Files, entry: ShardEntry) -> Iterator[Source]:
    """The shard file to read from, its size and its header verified."""
    with files.open(entry.name, entry.size) as source:
        header = bytearray(entry.header)
        source.read_into(memoryview(header), 0)
        if digest(header, algorithm_of(entry.digest)) != entry.digest:
            path = files.path(entry.name)
            raise DamagedCheckpointError(f"the header of {path} does not match its digest")
        yield source


def fill_chunk(source: Source, chunk: Chunk, tensor: str, path: str, target: memoryview) -> None:
    """Read ``chunk`` into ``target``, of exactly its length; the digest is checked afterwards.

    Several threads may fill chunks from one ``source``.
    """
    running = Digest(algorithm_of(chunk.digest))
    piece_bytes = source.piece_bytes
    for start in range(0, chunk.length, piece_bytes):
        piece = target[start : start + piece_bytes]
        source.read_into(piece, chunk.offset + start)
        running.update(piece)
    if running.text() != chunk.digest:
        raise DamagedCheckpointError(
            f"{path} does not match its digest at bytes {chunk.offset} to "
            f"{chunk.offset + chunk.length}, tensor {tensor!r}"
        )


@dataclass(frozen=True)
class Window:
    """Some bytes of a `Source`, in memory, from ``start`` on; a `Source` of these."""

    content: memoryview
    start: int
    piece_bytes: int = 1 << 20
    threads: int | None = None
    gather_bytes: int = 0

    def read_into(self, target: memoryview, offset: int) -> None:
        first = offset - self.start
        target[:] = self.content[first : first + len(target)]


def grouped(source: Source, items: Sequence[_T], chunk_of: Callable[[_T], Chunk]) -> list[list[_T]]:
    """``items``, sorted by offset, in groups that are best read from ``source`` at once."""
    groups: list[list[_T]] = []
    start = end = 0
    for item in items:
        chunk = chunk_of(item)
        far = chunk.offset + chunk.length - start > source.gather_bytes
        if not groups or far or chunk.offset > end:
            groups.append([])
            start = end = chunk.offset
        groups[-1].append(item)
        end = max(end, chunk.offset + chunk.length)
    return groups


def window(source: Source, chunks: Sequence[Chunk]) -> Source:
    """What to read these ``chunks``, one of the groups of `grouped`, from."""
    if len(chunks) == 1:
        return source
    start = chunks[0].offset
    end = max(chunk.offset + chunk.length for chunk in chunks)
    content = memoryview(bytearray(end - start))
    source.read_into(content, start)
    return Window(content, start)


def file_problems(
    files: Files,
    manifest: Manifest,
    *,
    progress: Callable[[int], object] = lambda done: None,
    threads: int | None = None,
) -> list[str]:
    """Every file and chunk of the manifest that is missing, short, changed or unreadable.

    ``progress`` is told how many bytes have been checked since it was last called, by one thread at
    a time. By default as many ``threads`` read as in a restore by this rank.
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
        held = sorted(
            chunks[shard.name].values(), key=lambda item: (item[0].offset, item[0].length)
        )
        try:
            find = partial(_shard_problems, files, shard, held, progress, threads)
            problems += reading(files, shard.name, find)
        except (DamagedCheckpointError, OSError) as error:
            problems.append(str(error))
    for entry in manifest.objects:
        try:
            reading(files, entry.name, partial(read_file, files, entry))
            progress(entry.size)
        except (DamagedCheckpointError, OSError) as error:
            problems.append(str(error))
    return problems


def _shard_problems(
    files: Files,
    shard: ShardEntry,
    held: list[tuple[Chunk, str]],
    progress: Callable[[int], object],
    threads: int | None,
) -> list[str]:
    path = files.path(shard.name)
    problems: dict[int, str] = {}  # by offset, because threads find them in any order
    end = shard.header
    for chunk, _ in held:
        if chunk.offset != end:
            problems[end] = f"{path} has bytes without a digest at {end}"
        end = chunk.offset + chunk.length
    if end != shard.size:
        problems[end] = f"{path} has bytes without a digest at {end}"
    told = threading.Lock()

    def check(source: Source, group: list[tuple[Chunk, str]]) -> None:
        near = window(source, [chunk for chunk, _ in group])
        for chunk, tensor in group:
            buffer = memoryview(bytearray(chunk.length))
            try:
                fill_chunk(near, chunk, tensor, path, buffer)
            except DamagedCheckpointError as error:
                problems[chunk.offset] = str(error)
            with told:
                progress(chunk.length)

    with open_shard(files, shard) as source:
        groups = grouped(source, held, lambda item: item[0])
        most = source.threads or threads or reader_threads()
        run_all(partial(check, source), groups, threads=most)
    return [problems[offset] for offset in sorted(problems)]
