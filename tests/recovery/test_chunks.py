"""Large parts are stored in chunks, written and read by several threads, and stay one tensor.

The chunk size and the thresholds are made small here, so that a few kilobytes take the paths of
gigabytes. How fast they are is measured in ci/bench/checkpoint.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from seatrial.recovery import CheckpointStore, Manifest, inspect_store, reader, saving, writer
from seatrial.recovery.errors import DamagedCheckpointError, SaveError
from seatrial.recovery.layout import Part, Region, split
from seatrial.recovery.reader import read_parts
from seatrial.recovery.storage import local_files
from seatrial.recovery.storage.local_files import LocalFiles, LocalSink


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 256 bytes, pieces of 100, and several threads whatever the machine."""
    monkeypatch.setattr(saving, "CHUNK_BYTES", 256)
    monkeypatch.setattr(writer, "_BATCH_BYTES", 200)
    monkeypatch.setattr(writer, "_PIECE_BYTES", 100)
    for module in (writer, reader):
        monkeypatch.setattr(module, "_ALONE_BYTES", 0)
    monkeypatch.setattr(writer, "writer_threads", lambda: 3)
    monkeypatch.setattr(reader, "reader_threads", lambda: 3)


def helper_is_running() -> bool:
    return threading.current_thread().name.startswith("seatrial-worker")


def file_of(store: CheckpointStore, manifest: Manifest) -> Path:
    (path,) = store.directory.glob(f"*/{manifest.attempt}/*.safetensors")
    return path


@pytest.mark.parametrize(
    ("sizes", "chunk_bytes"),
    [((10,), 16), ((10, 3), 24), ((3, 5, 4), 32), ((3, 5, 4), 4), ((2, 1, 7), 12), ((1, 100), 40)],
)
def test_pieces_are_the_region_cut_into_runs_of_bytes(
    sizes: tuple[int, ...], chunk_bytes: int
) -> None:
    offsets = tuple(range(3, 3 + len(sizes)))
    shape = tuple(offset + size for offset, size in zip(offsets, sizes, strict=True))
    region = Region("w", "float32", shape, offsets, sizes)
    whole = torch.arange(region.elements).to(torch.float32).reshape(sizes)
    pieces = split(region, chunk_bytes)
    assert all(piece.size_bytes <= chunk_bytes for piece in pieces)
    runs = [region.narrow(whole, piece) for piece in pieces]
    assert [tuple(run.shape) for run in runs] == [piece.sizes for piece in pieces]
    assert torch.equal(torch.cat([run.reshape(-1) for run in runs]), whole.reshape(-1))


def test_an_element_is_never_cut_and_what_fits_stays_whole() -> None:
    region = Region("w", "complex128", (3,), (0,), (3,))
    assert [piece.sizes for piece in split(region, 1)] == [(1,)] * 3
    assert split(region, 48) == [region]
    empty = Region("w", "float32", (0, 4), (0, 0), (0, 4))
    assert split(empty, 1) == [empty]


def test_a_tensor_of_many_chunks_comes_back_bitwise(
    tmp_path: Path, make_state: Any, same_tensors: Any
) -> None:
    store = CheckpointStore(tmp_path)
    manifest = store.save(make_state(1), step=1)
    (weight,) = [entry for entry in manifest.tensors if entry.name == "weight"]
    assert len(weight.chunks) == 20  # 40 rows of 120 bytes, two in a chunk
    ends = [chunk.offset + chunk.length for chunk in weight.chunks]
    assert [chunk.offset for chunk in weight.chunks[1:]] == ends[:-1]
    state = make_state(2)
    assert store.restore(state)
    assert same_tensors(state, make_state(1))
    assert inspect_store(tmp_path).latest_valid == 1


def test_strided_and_lazily_conjugated_tensors_of_many_chunks_come_back_bitwise(
    tmp_path: Path, make_state: Any
) -> None:
    def tensors(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        wide = torch.randn(30, 20, generator=generator, dtype=torch.complex64)
        return {
            "turned": torch.randn(40, 30, generator=generator).t(),
            "half": torch.randn(40, 30, generator=generator).to(torch.bfloat16).t(),
            "mask": (torch.rand(50, 40, generator=generator) > 0.5).t(),
            "tiny": torch.randn(40, 30, generator=generator).to(torch.float8_e5m2).t(),
            "every other": torch.randn(60, 20, generator=generator)[::2, ::2],
            "conjugated": wide.conj(),
            "negated": wide.conj().imag,
        }

    store = CheckpointStore(tmp_path)
    state = make_state(1)
    state.live = tensors(1)
    store.save(state, step=1)
    state.live = tensors(2)
    assert store.restore(state)
    for name, expected in tensors(1).items():
        found = state.live[name]
        width = (torch.uint8, torch.int16, torch.int32, torch.int64)[
            (1, 2, 4, 8).index(expected.dtype.itemsize)
        ]
        assert torch.equal(
            found.contiguous().resolve_conj().resolve_neg().view(width),
            expected.contiguous().resolve_conj().resolve_neg().view(width),
        ), name


def test_the_safetensors_library_reads_a_tensor_of_many_chunks_as_one(
    tmp_path: Path, make_state: Any
) -> None:
    store = CheckpointStore(tmp_path)
    manifest = store.save(make_state(1), step=1)
    read = load_file(file_of(store, manifest))
    assert torch.equal(read["weight"], make_state(1).live["weight"])
    assert torch.equal(read["turned"], make_state(1).live["turned"])


def test_a_part_of_a_tensor_reads_only_the_chunks_that_it_overlaps(
    tmp_path: Path, make_state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    manifest = store.save(make_state(1), step=1)
    attempt = file_of(store, manifest).parent
    bytes_read = 0
    preadv = os.preadv

    def counting(file: int, buffers: Any, offset: int) -> int:
        nonlocal bytes_read
        count = preadv(file, buffers, offset)
        bytes_read += count
        return count

    monkeypatch.setattr(reader, "reader_threads", lambda: 1)
    monkeypatch.setattr(os, "preadv", counting)
    # Rows 5 to 9 of 40: chunks of two rows from 4 to 10, the first only in part.
    target = torch.zeros(5, 30)
    region = Region("weight", "float32", (40, 30), (5, 0), (5, 30))
    read_parts(LocalFiles(attempt), manifest, [Part(region, target)])
    assert torch.equal(target, make_state(1).live["weight"][5:10])
    assert bytes_read == manifest.shards[0].header + 3 * 240


def test_damage_to_one_chunk_is_named_by_its_bytes_and_tensor(
    tmp_path: Path, make_state: Any
) -> None:
    store = CheckpointStore(tmp_path)
    manifest = store.save(make_state(1), step=1)
    (weight,) = [entry for entry in manifest.tensors if entry.name == "weight"]
    chunk = weight.chunks[7]
    path = file_of(store, manifest)
    content = bytearray(path.read_bytes())
    content[chunk.offset + 100] ^= 1
    path.write_bytes(content)
    (problem,) = store.verify(1)
    assert f"bytes {chunk.offset} to {chunk.offset + chunk.length}, tensor 'weight'" in problem
    with pytest.raises(DamagedCheckpointError, match=f"bytes {chunk.offset} to "):
        store.restore(make_state(2), step=1)


# Errors in a thread


def fail_in_a_helper(monkeypatch: pytest.MonkeyPatch, call: str, error: OSError) -> None:
    """The first ``os.<call>`` of a helper raises; the calling thread waits until it has."""
    real = getattr(os, call)
    failed = threading.Event()

    def failing(*arguments: Any) -> Any:
        if helper_is_running() and not failed.is_set():
            failed.set()
            raise error
        if not helper_is_running():
            assert failed.wait(60)
        return real(*arguments)

    monkeypatch.setattr(os, call, failing)


def test_no_space_left_in_one_writer_thread_fails_the_save_and_the_next_one_works(
    tmp_path: Path, make_state: Any, same_tensors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(LocalSink, "write_at", _header_first(LocalSink.write_at))
        fail_in_a_helper(patch, "pwrite", OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(SaveError, match=r"rank 0: OSError: .*No space left on device"):
            store.save(make_state(1), step=1)
    assert inspect_store(tmp_path).latest_published is None
    assert not [each for each in threading.enumerate() if "seatrial" in each.name]
    store.save(make_state(2), step=1)
    state = make_state(0)
    store.restore(state)
    assert same_tensors(state, make_state(2))


def _header_first(write_at: Callable[..., None]) -> Callable[..., None]:
    """The header is written before any thread is started, so nothing may wait for one there."""

    def write(sink: LocalSink, data: bytes, offset: int) -> None:
        if offset == 0:
            os.lseek(sink._file, 0, os.SEEK_SET)
            os.write(sink._file, data)
        else:
            write_at(sink, data, offset)

    return write


def test_an_unreadable_chunk_in_one_reader_thread_is_damage(
    tmp_path: Path, make_state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(make_state(1), step=1)
    preadv = os.preadv

    def failing(file: int, buffers: Any, offset: int) -> int:
        if helper_is_running():
            raise OSError(errno.EIO, "Input/output error")
        return preadv(file, buffers, offset)

    monkeypatch.setattr(reader, "fill_chunk", _only_by_helpers(reader.fill_chunk))
    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(DamagedCheckpointError, match=r"unreadable: .*Input/output error"):
        store.restore(make_state(2), step=1)
    assert not [each for each in threading.enumerate() if "seatrial" in each.name]


def _only_by_helpers(fill: Callable[..., None]) -> Callable[..., None]:
    """The calling thread fills nothing until a helper has begun."""
    begun = threading.Event()

    def filling(*arguments: Any) -> None:
        if helper_is_running():
            begun.set()
        assert begun.wait(60)
        fill(*arguments)

    return filling


def test_a_disk_that_is_too_full_is_told_before_anything_is_written(
    tmp_path: Path, make_state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_file: int, size_bytes: int) -> None:
        raise OSError(errno.ENOSPC, f"No space left on device for {size_bytes} bytes")

    monkeypatch.setattr(local_files, "_SMALL_BYTES", 0)
    monkeypatch.setattr(local_files, "preallocate", full)
    monkeypatch.setattr(os, "pwrite", None)
    with pytest.raises(SaveError, match=r"No space left on device for [0-9]+ bytes"):
        CheckpointStore(tmp_path).save(make_state(1), step=1)


def test_events_are_announced_in_the_thread_that_saves_and_restores(
    tmp_path: Path, make_state: Any
) -> None:
    from seatrial.recovery.probe import listen

    threads = set()
    stop = listen(lambda *_: threads.add(threading.current_thread()))
    store = CheckpointStore(tmp_path)
    store.save(make_state(1), step=1)
    store.restore(make_state(2))
    stop()
    assert threads == {threading.current_thread()}
