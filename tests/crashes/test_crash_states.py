"""Every state that a crash can leave: ours always recover, broken protocols are always caught."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from crash_protocols import load_pointer, record_pointer, without
from torch.distributed.checkpoint.api import CheckpointException

from seatrial.chaos.crashes.disk import MODELS, Model
from seatrial.chaos.crashes.explore import explore
from seatrial.chaos.crashes.operations import Operation, Recording
from seatrial.chaos.crashes.own_store import record_store, restore
from seatrial.chaos.crashes.recorder import Messages, record
from seatrial.chaos.crashes.table import table
from seatrial.chaos.errors import ChaosError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record_store(tmp_path_factory.mktemp("crash") / "store", ranks=4)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_every_crash_state_of_this_projects_save_recovers(
    tmp_path: Path, ranks: int, model: Model
) -> None:
    recording = record_store(tmp_path / "store", ranks=ranks)
    found = explore(recording, restore(ranks), old=1, new=2, model=model)
    assert (found.counterexample, found.complete) == (None, True)
    assert set(found.outcomes) == {"1", "2"}


@pytest.mark.parametrize("model", MODELS)
def test_deciding_everything_first_comes_to_the_same(tmp_path: Path, model: Model) -> None:
    recording = record_store(tmp_path / "store", ranks=1)
    lazily = explore(recording, restore(1), old=1, new=2, model=model)
    everything = explore(recording, restore(1), old=1, new=2, model=model, look="everything")
    assert (everything.counterexample, everything.complete) == (None, True)
    assert set(everything.outcomes) == set(lazily.outcomes)
    assert everything.runs > 2 * lazily.runs


def is_shard_fsync(operation: Operation) -> bool:
    return operation.kind == "fsync" and "rank-" in operation.path


def is_attempt_fsync(operation: Operation) -> bool:
    return operation.kind == "fsync" and operation.path.rpartition("/")[2].startswith("attempt-")


def is_manifest_fsync(operation: Operation) -> bool:
    return operation.kind == "fsync" and "manifest" in operation.path


def is_a_report(operation: Operation) -> bool:
    return operation.kind == "hear" and operation.rank == 0


BROKEN = {
    "no fsync of shards": (is_shard_fsync, MODELS, "rank-"),
    "no fsync of the directory of shards": (is_attempt_fsync, ["weak"], "rank-"),
    "no barrier before the manifest": (is_a_report, MODELS, "rank-"),
    "manifest not synced": (is_manifest_fsync, MODELS, "manifest.json"),
}


@pytest.mark.parametrize(
    ("name", "model"),
    [(name, model) for name, (_, models, _) in BROKEN.items() for model in models],
)
def test_a_save_without_one_of_its_steps_is_caught(
    saved: Recording, name: str, model: Model
) -> None:
    is_left_out, _, culprit = BROKEN[name]
    found = explore(without(saved, is_left_out), restore(4), old=1, new=2, model=model)
    assert found.counterexample is not None
    assert "the save had returned, and recovery returns 1" in found.counterexample.reason
    left = table(found.counterexample).partition("what was left")[2]
    assert culprit in left


@pytest.mark.parametrize("model", MODELS)
def test_a_manifest_whose_directory_is_not_synced_is_caught(saved: Recording, model: Model) -> None:
    last = [o for o in saved.ranks[0] if o.kind == "fsync"][-1]
    found = explore(without(saved, last.__eq__), restore(4), old=1, new=2, model=model)
    assert found.counterexample is not None
    assert "nothing               step-00000002/manifest.json" in table(found.counterexample)


def test_metadata_in_order_needs_no_fsync_of_the_directory_of_shards(saved: Recording) -> None:
    shortened = without(saved, is_attempt_fsync)
    found = explore(shortened, restore(4), old=1, new=2, model="journal")
    assert (found.counterexample, found.complete) == (None, True)


@pytest.mark.parametrize("model", MODELS)
def test_a_right_pointer_protocol_passes(tmp_path: Path, model: Model) -> None:
    recording = record_pointer(tmp_path / "pointer")
    found = explore(recording, load_pointer, old=1, new=2, model=model)
    assert (found.counterexample, found.complete) == (None, True)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("mistake", "reason"),
    [
        ("in_place", "recovery fails: ValueError: the shard of rank"),
        ("early", "recovery fails: "),
        ("deletes_first", "recovery fails: FileNotFoundError"),
    ],
)
def test_a_broken_pointer_protocol_is_caught(
    tmp_path: Path, mistake: str, reason: str, model: Model
) -> None:
    recording = record_pointer(tmp_path / "pointer", **{mistake: True})
    found = explore(recording, load_pointer, old=1, new=2, model=model)
    assert found.counterexample is not None
    assert found.counterexample.reason.startswith(reason)


def test_the_counterexample_has_only_what_led_to_it(tmp_path: Path) -> None:
    recording = record_pointer(tmp_path / "pointer", in_place=True)
    found = explore(recording, load_pointer, old=1, new=2, model="journal")
    assert found.counterexample is not None
    # Emptying the first shard that comes is enough.
    assert [o.kind for o in found.counterexample.done if o.kind != "hear"] == ["truncate"]


def test_a_rank_may_be_anywhere_that_the_others_have_not_heard_it_pass(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()

    def write(rank: int) -> Callable[[Messages], object]:
        return lambda _: (tmp_path / "root" / str(rank)).write_bytes(b"x")

    recording = record(tmp_path / "root", [write(rank) for rank in range(3)])
    seen = set()

    def recover(root: Path) -> int:
        seen.add(tuple((root / str(rank)).exists() for rank in range(3)))
        return 1

    explore(recording, recover, old=1, new=1, model="journal")
    assert seen == set(itertools.product([False, True], repeat=3))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_power_loss_during_dcp_save_over_a_checkpoint_is_caught(tmp_path: Path) -> None:
    """What was measured on real disks: an empty ``.metadata`` though the save had returned."""
    root = tmp_path / "dcp"
    state = {"w": torch.full((4,), 1.0)}
    root.mkdir()

    def save(value: float) -> Callable[[Messages], object]:
        tensors = {"w": torch.full((4,), value)}
        writer = dcp.FileSystemWriter(root, single_file_per_rank=True, sync_files=True)
        return lambda _: dcp.save(tensors, storage_writer=writer, no_dist=True)

    recording = record(root, [save(2.0)])

    def load(found: Path) -> int:
        try:
            dcp.load(state, storage_reader=dcp.FileSystemReader(found), no_dist=True)
        except CheckpointException:
            return 0
        return int(state["w"][0])

    found = explore(recording, load, old=0, new=2, model="journal", look="everything")
    assert found.counterexample is not None
    assert "the save had returned, and recovery returns 0" in found.counterexample.reason
    assert ".metadata" in table(found.counterexample).partition("what was left")[2]


def test_a_save_that_writes_past_the_recorder_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "native"
    root.mkdir()
    with pytest.raises(ChaosError, match=r"x\.pt was written past the recorder"):
        record(root, [lambda _: torch.save({"w": torch.ones(4)}, root / "x.pt")])


def test_a_file_that_was_empty_for_a_moment_is_seen(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"1")

    def save(_: Messages) -> None:
        os.truncate(tmp_path / "data", 0)
        with open(tmp_path / "data", "r+b") as file:
            file.write(b"2")

    (operations,) = record(tmp_path, [save]).ranks
    assert [o.kind for o in operations] == ["truncate", "write", "acknowledge"]


def make_and_remove(root: Path) -> None:
    (root / "lock").write_bytes(b"x")
    (root / "lock").unlink()


def make_and_remove_directory(root: Path) -> None:
    os.mkdir(root / "lock")
    shutil.rmtree(root / "lock")


def fsync_directory(root: Path) -> None:
    descriptor = os.open(root, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def rename_and_back(root: Path) -> None:
    (root / "data").rename(root / "other")
    (root / "other").rename(root / "data")


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (make_and_remove, "create lock"),
        (make_and_remove_directory, "mkdir lock"),
        (fsync_directory, r"fsync \."),
        (rename_and_back, "rename data"),
        (lambda root: (root / "data").write_bytes(b"x"), "truncate data"),
    ],
)
def test_what_a_helper_thread_did_is_refused_even_if_nothing_is_left_of_it(
    tmp_path: Path, work: Callable[[Path], object], said: str
) -> None:
    def save(_: Messages) -> None:
        (tmp_path / "data").write_bytes(b"x")
        helper = threading.Thread(target=work, args=(tmp_path,))
        helper.start()
        helper.join()

    with pytest.raises(ChaosError, match=f"a thread that is no rank's did {said}"):
        record(tmp_path, [save])


def test_what_a_helper_thread_writes_to_a_ranks_open_file_is_refused(tmp_path: Path) -> None:
    def save(_: Messages) -> None:
        descriptor = os.open(tmp_path / "data", os.O_CREAT | os.O_WRONLY)
        helper = threading.Thread(target=os.pwrite, args=(descriptor, b"x", 0))
        helper.start()
        helper.join()
        os.close(descriptor)

    with pytest.raises(ChaosError, match="a thread that is no rank's did write data"):
        record(tmp_path, [save])


def test_a_helper_thread_may_read_and_work_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()

    def work() -> None:
        (tmp_path / "elsewhere").write_bytes((tmp_path / "root" / "data").read_bytes())

    def save(_: Messages) -> None:
        (tmp_path / "root" / "data").write_bytes(b"x")
        helper = threading.Thread(target=work)
        helper.start()
        helper.join()

    (operations,) = record(tmp_path / "root", [save]).ranks
    assert [o.kind for o in operations] == ["create", "write", "acknowledge"]
    assert (tmp_path / "elsewhere").read_bytes() == b"x"


def test_a_save_that_fails_is_reported_with_its_error(tmp_path: Path) -> None:
    def fail(_: Messages) -> None:
        raise KeyError("quux")

    with pytest.raises(ChaosError, match="failed: 'quux'"):
        record(tmp_path, [fail])


def test_a_recovery_that_looks_at_nothing_proves_nothing(tmp_path: Path) -> None:
    recording = record_pointer(tmp_path / "pointer")
    with pytest.raises(ChaosError, match="not seen to look at anything"):
        explore(recording, lambda _: 2, old=1, new=2, model="weak")
