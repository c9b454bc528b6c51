"""Every kind of damage to every file is found, named, and never restored from."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seatrial.recovery import CheckpointStore, inspect_store
from seatrial.recovery.directory import CheckpointDirectory
from seatrial.recovery.errors import DamagedCheckpointError, NoValidCheckpointError
from seatrial.recovery.exchange import Exchange
from seatrial.recovery.files import file_problems
from seatrial.recovery.inspect import step_problems

FILES = [
    "manifest.json",
    "attempt-*/rank-00000.safetensors",
    "attempt-*/rank-00001.safetensors",
    "attempt-*/rank-00000.json",
    "attempt-*/rank-00001.json",
]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def extend(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"\0")


def symlink(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def swap_for_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def swap_for_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = [
    flip,
    truncate,
    extend,
    zero,
    symlink,
    Path.unlink,
    swap_for_a_directory,
    swap_for_a_pipe,
]


@pytest.fixture(scope="module")
def pristine(
    tmp_path_factory: pytest.TempPathFactory,
    make_state: Any,
    run_threads: Callable[..., list[Any]],
) -> Path:
    """Steps 1 and 2, saved by two ranks that hold equal tensors."""
    directory = tmp_path_factory.mktemp("pristine") / "store"

    def work(rank: int, exchange: Exchange) -> None:
        store = CheckpointStore(directory, exchange=exchange)
        for step in (1, 2):
            store.save(make_state(step, rank), step=step)

    assert run_threads(2, work) == [None] * 2
    return directory


@pytest.fixture
def directory(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "store", symlinks=True))


def damaged_file(directory: Path, step: int, pattern: str) -> Path:
    (path,) = (directory / f"step-0000000{step}").glob(pattern)
    return path


def test_the_pristine_checkpoints_are_valid_and_both_ranks_stored_tensors(pristine: Path) -> None:
    report = inspect_store(pristine)
    assert [(step.step, step.valid) for step in report.steps] == [(1, True), (2, True)]
    for shard in pristine.glob("step-*/attempt-*/*.safetensors"):
        assert shard.stat().st_size > 100


# A step without its manifest was never published; see test_store.py.
@pytest.mark.parametrize(
    ("pattern", "damage"),
    [(p, d) for p in FILES for d in DAMAGES if (p, d) != ("manifest.json", Path.unlink)],
)
def test_damage_is_named_set_aside_and_the_older_checkpoint_restored(
    directory: Path,
    make_state: Any,
    same_tensors: Any,
    pattern: str,
    damage: Callable[[Path], object],
) -> None:
    path = damaged_file(directory, 2, pattern)
    damage(path)
    assert any(
        path.name in p or "manifest" in p
        for p in step_problems(CheckpointDirectory.at(directory), 2)
    )
    state = make_state(0)
    restored = CheckpointStore(directory).restore(state)
    assert restored is not None
    assert restored.step == 1
    assert same_tensors(state, make_state(1))
    ((step, reason),) = restored.damaged
    assert step == 2
    assert path.name in reason or "the manifest" in reason
    report = inspect_store(directory)
    assert [each.step for each in report.steps] == [1]
    assert report.quarantined == ("step-00000002-1",)
    note = json.loads((directory / "quarantine/step-00000002-1.json").read_text())
    assert note == {"step": 2, "reason": reason}


@pytest.mark.parametrize("pattern", FILES)
def test_each_of_many_random_bit_flips_is_found(directory: Path, pattern: str) -> None:
    path = damaged_file(directory, 2, pattern)
    pristine = path.read_bytes()
    choose = random.Random(pattern)
    for _ in range(300):
        content = bytearray(pristine)
        content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
        path.write_bytes(content)
        assert step_problems(CheckpointDirectory.at(directory), 2), "a flipped bit was not found"
    path.write_bytes(pristine)
    assert step_problems(CheckpointDirectory.at(directory), 2) == []


def test_a_restore_itself_finds_each_of_many_random_bit_flips(
    directory: Path, make_state: Any
) -> None:
    shutil.rmtree(directory / "step-00000001")
    choose = random.Random(0)
    for pattern in FILES:
        path = damaged_file(directory, 2, pattern)
        pristine = path.read_bytes()
        for _ in range(20):
            content = bytearray(pristine)
            content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
            path.write_bytes(content)
            with pytest.raises(NoValidCheckpointError):
                CheckpointStore(directory).restore(make_state(0))
        path.write_bytes(pristine)


def test_a_symlinked_attempt_directory_is_damage(directory: Path, make_state: Any) -> None:
    attempt = damaged_file(directory, 2, "attempt-*")
    attempt.rename(directory / "elsewhere")
    attempt.symlink_to(directory / "elsewhere")
    restored = CheckpointStore(directory).restore(make_state(0))
    assert restored is not None
    assert restored.step == 1


def test_damage_that_only_one_rank_sees_makes_all_ranks_fall_back_together(
    directory: Path, make_state: Any, same_tensors: Any, run_threads: Callable[..., list[Any]]
) -> None:
    flip(damaged_file(directory, 2, "attempt-*/rank-00001.safetensors"))

    def work(rank: int, exchange: Exchange) -> object:
        state = make_state(0)
        if rank == 0:
            # Holds nothing that rank 1 stored, as under sharding.
            manifest = CheckpointStore(directory).list()
            assert manifest[-1].step == 2
            stored_by_0 = stored_by(directory, 2, "rank-00000.safetensors")
            state.live = {name: state.live[name] for name in stored_by_0}
        restored = CheckpointStore(directory, exchange=exchange).restore(state)
        assert restored is not None
        return restored.step, restored.damaged[0][1], state.live["none"].shape

    first, second = run_threads(2, work)
    assert first[:2] == second[:2]
    assert first[0] == 1
    assert "rank 1" in first[1]
    assert "rank 0:" not in first[1]


def stored_by(directory: Path, step: int, file: str) -> set[str]:
    fields = json.loads(damaged_file(directory, step, "manifest.json").read_text())["manifest"]
    return {t["name"] for t in fields["tensors"] if t["chunks"][0]["file"] == file} | {"none"}


def test_when_all_are_damaged_every_rank_says_so_each_time_and_nothing_is_moved(
    directory: Path, make_state: Any, run_threads: Callable[..., list[Any]]
) -> None:
    flip(damaged_file(directory, 1, "manifest.json"))
    damaged_file(directory, 2, "attempt-*/rank-00001.json").unlink()

    def work(_rank: int, exchange: Exchange) -> None:
        CheckpointStore(directory, exchange=exchange).restore(make_state(0))

    for _ in range(2):
        for error in run_threads(2, work):
            assert isinstance(error, NoValidCheckpointError)
            assert "step 2: " in str(error)
            assert "rank-00001.json is missing" in str(error)
            assert "step 1: " in str(error)
    assert inspect_store(directory).quarantined == ()


def test_damaged_checkpoints_in_quarantine_alone_are_not_nothing(
    directory: Path, make_state: Any
) -> None:
    flip(damaged_file(directory, 2, "manifest.json"))
    CheckpointStore(directory).restore(make_state(0))
    shutil.rmtree(directory / "step-00000001")
    with pytest.raises(NoValidCheckpointError, match="step-00000002-1"):
        CheckpointStore(directory).restore(make_state(0))


def test_a_damaged_step_that_was_asked_for_is_an_error(directory: Path, make_state: Any) -> None:
    flip(damaged_file(directory, 2, "attempt-*/rank-00000.json"))
    with pytest.raises(DamagedCheckpointError, match="step 2"):
        CheckpointStore(directory).restore(make_state(0), step=2)
    assert inspect_store(directory).quarantined == ()


def test_the_step_of_a_quarantined_checkpoint_can_be_saved_again(
    directory: Path, make_state: Any
) -> None:
    flip(damaged_file(directory, 2, "manifest.json"))
    store = CheckpointStore(directory)
    store.restore(make_state(0))
    assert store.save(make_state(2), step=2).parent_step == 1
    flip(damaged_file(directory, 2, "manifest.json"))
    store.restore(make_state(0))
    assert inspect_store(directory).quarantined == ("step-00000002-1", "step-00000002-2")


def test_several_threads_find_the_same_damage_in_the_same_order(directory: Path) -> None:
    store = CheckpointDirectory.at(directory)
    manifest = store.read_manifest(2).manifest
    files = store.files(manifest)
    for shard in manifest.shards:
        content = bytearray(Path(files.path(shard.name)).read_bytes())
        for tensor in manifest.tensors:
            for chunk in tensor.chunks:
                if chunk.file == shard.name and chunk.length:
                    content[chunk.offset] ^= 1
        Path(files.path(shard.name)).write_bytes(content)
    checked: list[int] = []
    found = file_problems(files, manifest, threads=4, progress=checked.append)
    assert found == file_problems(files, manifest, threads=1)
    lengths = {(c.file, c.offset): c.length for t in manifest.tensors for c in t.chunks}
    assert len(found) == sum(length > 0 for length in lengths.values()) > 4
    assert sum(checked) == sum(lengths.values()) + sum(entry.size for entry in manifest.objects)
