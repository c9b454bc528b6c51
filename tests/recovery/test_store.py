"""One rank's view of the store: what is saved comes back, errors name their cause, retention holds.

Kills, several ranks and damage have modules of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from seatrial.recovery import CheckpointStore, inspect_store
from seatrial.recovery.errors import (
    AlreadyPublishedError,
    CheckpointError,
    MismatchError,
    NoValidCheckpointError,
    SaveError,
)
from seatrial.recovery.probe import listen

COMMIT = [
    "checkpoint/shard/write",
    "checkpoint/shard/fsync",
    "checkpoint/shard/write",
    "checkpoint/shard/fsync",
    "checkpoint/directory/fsync",
    "checkpoint/report",
    "checkpoint/gather",
    "checkpoint/manifest/write",
    "checkpoint/manifest/fsync",
    "checkpoint/manifest/link",
    "checkpoint/manifest/directory",
    "checkpoint/acknowledge",
    "checkpoint/collect",
    "checkpoint",
]
RESTORE = [
    "restore/manifest/read",
    "restore/shard/read",
    "restore/shard/read",
    "restore/agree",
    "restore/load",
    "restore",
    "checkpoint/collect",
]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "store", keep_last=2)


def fail_at(event: str, edge: str, error: Exception) -> Callable[[], None]:
    """Raise ``error`` the first time that ``event`` is announced."""

    def listener(name: str, at: str, facts: dict[str, object]) -> None:
        if (name, at) == (event, edge):
            stop()
            raise error

    stop = listen(listener)
    return stop


def test_a_state_saved_before_the_first_step_comes_back(
    store: CheckpointStore, make_state: Any, same_tensors: Any
) -> None:
    store.save(make_state(1), step=0)
    state = make_state(2)
    restored = store.restore(state)
    assert restored is not None
    assert (restored.step, restored.damaged) == (0, ())
    assert same_tensors(state, make_state(1))
    assert store.latest() == 0


def test_nothing_published_is_none_and_leaves_the_state_alone(
    store: CheckpointStore, make_state: Any, same_tensors: Any
) -> None:
    state = make_state(1)
    assert store.restore(state) is None
    assert store.latest() is None
    assert store.list() == []
    assert (state.prepared, state.loaded) == ([], None)
    assert same_tensors(state, make_state(1))


def test_what_was_saved_comes_back_bitwise(
    store: CheckpointStore, make_state: Any, same_tensors: Any
) -> None:
    store.save(make_state(1), step=7)
    state = make_state(2)
    restored = store.restore(state)
    assert restored is not None
    assert (restored.step, restored.damaged) == (7, ())
    assert same_tensors(state, make_state(1))
    shared, ranks, rank = state.loaded
    assert (shared, rank) == ({"lr": 0.1, "nested": [(1, b"x"), {2: None}]}, 0)
    assert ranks.keys() == {0}
    assert torch.equal(ranks[0]["rng"], torch.arange(3))
    assert state.prepared[0]["wide"].dtype is torch.complex128
    assert state.prepared[0]["turned"].shape == (6, 5)


def test_the_safetensors_library_reads_a_shard(store: CheckpointStore, make_state: Any) -> None:
    manifest = store.save(make_state(1), step=7)
    read = load_file(store.directory / "step-00000007" / manifest.attempt / manifest.shards[0].name)
    live = make_state(1).live
    assert read.keys() == live.keys()
    for name in live.keys() - {"wide"}:
        assert torch.equal(read[name], live[name])
    assert torch.equal(read["wide"].view(torch.complex128), live["wide"])


def test_tensors_in_a_shard_are_aligned_to_their_elements(
    store: CheckpointStore, make_state: Any
) -> None:
    manifest = store.save(make_state(1), step=7)
    for entry in manifest.tensors:
        itemsize = getattr(torch, entry.dtype).itemsize
        assert entry.chunks[0].offset % min(itemsize, 8) == 0, entry.name


def test_the_manifest_says_who_saved_and_where_it_came_from(
    tmp_path: Path, make_state: Any
) -> None:
    store = CheckpointStore(tmp_path, topology="dp1", writer={"attempt": 3}, run={"lr": 0.5})
    store.save(make_state(1), step=7)
    manifest = store.save(make_state(2), step=8)
    assert (manifest.step, manifest.parent_step, manifest.world_size) == (8, 7, 1)
    assert (manifest.topology, manifest.writer, manifest.run) == (
        "dp1",
        {"attempt": 3},
        {"lr": 0.5},
    )
    again = CheckpointStore(tmp_path)
    again.restore(make_state(0), step=7)
    assert again.save(make_state(3), step=9).parent_step == 7


def test_the_commit_protocol_announces_its_steps_in_order(
    store: CheckpointStore, make_state: Any, announcements: list[tuple[str, str, dict[str, Any]]]
) -> None:
    store.save(make_state(1), step=7)
    assert [event for event, edge, _ in announcements if edge == "after"] == COMMIT
    assert announcements[0][:2] == ("checkpoint", "before")
    assert all(facts["step"] == 7 for _, _, facts in announcements)


def test_the_restore_protocol_announces_its_steps_in_order(
    store: CheckpointStore, make_state: Any, announcements: list[tuple[str, str, dict[str, Any]]]
) -> None:
    store.save(make_state(1), step=7)
    announcements.clear()
    store.restore(make_state(2))
    assert [event for event, edge, _ in announcements if edge == "after"] == RESTORE
    assert announcements[0][:2] == ("restore", "before")
    assert all(facts["step"] == 7 for _, _, facts in announcements)


@pytest.mark.parametrize("edge", ["before", "after"])
@pytest.mark.parametrize("event", COMMIT[:-2])
def test_an_error_at_any_point_of_a_save_is_raised_and_the_store_is_old_or_new(
    store: CheckpointStore, make_state: Any, same_tensors: Any, event: str, edge: str
) -> None:
    store.save(make_state(1), step=1)
    fail_at(event, edge, OSError(28, "No space left on device"))
    with pytest.raises(SaveError, match=r"step 2.*rank 0.*No space left"):
        store.save(make_state(2), step=2)
    report = inspect_store(store.directory)
    assert [step.problems for step in report.steps if step.published and not step.valid] == []
    # An error of the last three points says itself that the step was published.
    visible = event in ("checkpoint/manifest/directory", "checkpoint/acknowledge") or (
        edge == "after" and event in ("checkpoint/report", "checkpoint/manifest/link")
    )
    assert report.latest_published == (2 if visible else 1)
    state = make_state(0)
    store.restore(state)
    assert same_tensors(state, make_state(report.latest_published))


def test_a_save_that_failed_can_be_repeated(store: CheckpointStore, make_state: Any) -> None:
    fail_at("checkpoint/shard/fsync", "before", OSError(5, "Input/output error"))
    with pytest.raises(SaveError):
        store.save(make_state(2), step=2)
    assert store.save(make_state(2), step=2).step == 2
    assert inspect_store(store.directory).leftovers == ()


def test_the_space_of_a_failed_save_is_given_back(store: CheckpointStore, make_state: Any) -> None:
    fail_at("checkpoint/shard/fsync", "before", OSError(28, "No space left on device"))
    with pytest.raises(SaveError):
        store.save(make_state(2), step=2)
    assert list(store.directory.rglob("*.safetensors")) == []


def test_a_step_is_published_once(store: CheckpointStore, make_state: Any) -> None:
    first = store.save(make_state(1), step=7)
    with pytest.raises(AlreadyPublishedError, match="step 7"):
        store.save(make_state(2), step=7)
    assert store.list()[0].attempt == first.attempt
    assert inspect_store(store.directory).leftovers == ()


def test_state_that_cannot_be_stored_is_named_before_anything_is_written(
    store: CheckpointStore, make_state: Any
) -> None:
    state = make_state(1)
    state.own["stream"] = object()
    with pytest.raises(SaveError, match=r"state\['rank'\]\['stream'\] is a builtins.object"):
        store.save(state, step=7)
    assert not store.directory.exists()


def test_missing_and_unexpected_tensors_are_listed_and_nothing_is_overwritten(
    store: CheckpointStore, make_state: Any, same_tensors: Any
) -> None:
    store.save(make_state(1), step=7)
    state = make_state(2)
    state.live["new"] = state.live.pop("half")
    before = {name: tensor.clone() for name, tensor in state.live.items()}
    with pytest.raises(MismatchError, match=r"missing here \['half'\].*\['new'\]"):
        store.restore(state)
    assert all(torch.equal(state.live[name], tensor) for name, tensor in before.items())
    assert store.latest() == 7
    assert inspect_store(store.directory).quarantined == ()


@pytest.mark.parametrize("change", [lambda t: t.double(), lambda t: t[:-1].clone()])
def test_another_dtype_or_shape_is_a_mismatch(
    store: CheckpointStore, make_state: Any, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    store.save(make_state(1), step=7)
    state = make_state(2)
    state.live["weight"] = change(state.live["weight"])
    with pytest.raises(MismatchError, match=r"weight is float32\[40, 30\] in the checkpoint"):
        store.restore(state)


def test_tensors_made_by_prepare_are_filled(store: CheckpointStore, make_state: Any) -> None:
    store.save(make_state(1), step=7)
    state = make_state(2)
    del state.live["half"]
    state.prepare = lambda stored: state.live.setdefault(
        "half", torch.zeros(stored["half"].shape, dtype=stored["half"].dtype)
    )
    store.restore(state)
    assert torch.equal(state.live["half"], make_state(1).live["half"])


def test_a_chosen_step_is_restored(
    store: CheckpointStore, make_state: Any, same_tensors: Any
) -> None:
    store.save(make_state(1), step=1)
    store.save(make_state(2), step=2)
    state = make_state(0)
    store.restore(state, step=1)
    assert same_tensors(state, make_state(1))
    with pytest.raises(CheckpointError, match=r"step 5 is not published.*\[1, 2\]"):
        store.restore(state, step=5)


def test_objects_that_the_state_refuses_stop_the_restore_with_their_error(
    store: CheckpointStore, make_state: Any
) -> None:
    store.save(make_state(1), step=1)
    state = make_state(2)
    state.load_objects = lambda *_: 1 / 0
    with pytest.raises(CheckpointError, match="rank 0: ZeroDivisionError") as caught:
        store.restore(state)
    assert not isinstance(caught.value, NoValidCheckpointError)
    assert store.latest() == 1


def test_a_transient_read_error_loses_nothing(
    store: CheckpointStore, make_state: Any, same_tensors: Any
) -> None:
    store.save(make_state(1), step=1)
    store.save(make_state(2), step=2)
    fail_at("restore/shard/read", "before", OSError(5, "Input/output error"))
    state = make_state(0)
    restored = store.restore(state)
    assert restored is not None
    assert (restored.step, restored.damaged) == (2, ())
    assert same_tensors(state, make_state(2))


def test_a_storage_that_refuses_to_read_stops_the_restore_and_is_no_damage(
    store: CheckpointStore, make_state: Any
) -> None:
    store.save(make_state(1), step=1)
    store.save(make_state(2), step=2)

    def refuse(event: str, edge: str, facts: dict[str, object]) -> None:
        if event == "restore/shard/read":
            raise PermissionError(13, "Permission denied")

    stop = listen(refuse)
    with pytest.raises(CheckpointError, match="Permission denied"):
        store.restore(make_state(0))
    stop()
    assert [info.step for info in store.list()] == [1, 2]


# Retention


def saved(store: CheckpointStore, make_state: Any, *steps: int) -> list[int]:
    for step in steps:
        store.save(make_state(step), step=step)
    return [info.step for info in store.list()]


def test_the_newest_are_kept_and_one_that_is_known_to_be_good(
    store: CheckpointStore, make_state: Any
) -> None:
    assert saved(store, make_state, 1, 2) == [1, 2]
    # The first time that something is to go, the newest is verified, and stays from then on.
    assert saved(store, make_state, 3) == [2, 3]
    assert saved(store, make_state, 4, 5, 6) == [3, 5, 6]
    assert [info.step for info in store.list() if info.verified] == [3]


def test_the_restored_one_stays_until_a_newer_one_is_verified(
    store: CheckpointStore, make_state: Any
) -> None:
    saved(store, make_state, 1)
    store.restore(make_state(0))
    assert saved(store, make_state, 2, 3, 4) == [1, 3, 4]
    assert store.verify(3) == []
    assert saved(store, make_state, 5) == [3, 4, 5]
    store.restore(make_state(0))
    assert [info.step for info in store.list()] == [4, 5]


def test_pruning_verifies_the_newest_and_then_needs_no_older_one(
    store: CheckpointStore, make_state: Any
) -> None:
    saved(store, make_state, 1)
    store.restore(make_state(0))
    saved(store, make_state, 2, 3)
    assert store.prune() == ["step-00000001"]
    assert [info.step for info in store.list()] == [2, 3]


def test_a_good_one_stays_while_all_newer_ones_are_damaged(
    store: CheckpointStore, make_state: Any
) -> None:
    def damage(event: str, edge: str, facts: dict[str, Any]) -> None:
        if (event, edge) == ("checkpoint/collect", "before") and facts["step"] > 1:
            for file in store.directory.glob(f"step-0000000{facts['step']}/*/*.safetensors"):
                file.write_bytes(b"")

    stop = listen(damage)
    steps = saved(store, make_state, 1, 2, 3, 4)
    stop()
    assert steps == [1, 3, 4]


def test_leftovers_are_collected_after_a_save_and_after_a_restore(
    store: CheckpointStore, make_state: Any
) -> None:
    saved(store, make_state, 1)

    def litter() -> None:
        (store.directory / "step-00000009/attempt-dead").mkdir(parents=True)
        (store.directory / "step-00000009/attempt-dead/rank-00000.json").touch()
        (store.directory / "step-00000001/attempt-late").mkdir()
        (store.directory / "step-00000001/.manifest.json.0.tmp").touch()
        (store.directory / ".trash-0").mkdir()

    expected = (
        ".trash-0",
        "step-00000001/.manifest.json.0.tmp",
        "step-00000001/attempt-late",
        "step-00000009",
    )
    litter()
    assert inspect_store(store.directory).leftovers == expected
    restored = store.restore(make_state(0))
    assert restored is not None
    assert restored.collected == expected
    assert inspect_store(store.directory).leftovers == ()
    litter()
    saved(store, make_state, 2)
    assert inspect_store(store.directory).leftovers == ()


def test_a_step_without_a_manifest_is_never_resumed_from(
    store: CheckpointStore, make_state: Any
) -> None:
    saved(store, make_state, 1, 2)
    (store.directory / "step-00000002/manifest.json").unlink()
    assert store.latest() == 1
    restored = store.restore(make_state(0))
    assert restored is not None
    assert (restored.step, restored.damaged) == (1, ())


def test_leftovers_that_cannot_be_deleted_are_a_warning_and_not_a_failed_save(
    store: CheckpointStore, make_state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at("checkpoint/manifest/fsync", "before", OSError(5, "Input/output error"))
    with pytest.raises(SaveError):
        saved(store, make_state, 1)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.warns(RuntimeWarning, match="could not be deleted"):
        assert saved(store, make_state, 2) == [2]


def test_inspecting_writes_nothing(store: CheckpointStore, make_state: Any) -> None:
    saved(store, make_state, 1)
    before = sorted(os.walk(store.directory))
    report = inspect_store(store.directory)
    assert (report.latest_valid, report.latest_published) == (1, 1)
    assert report.steps[0].attempt == store.list()[0].attempt
    assert sorted(os.walk(store.directory)) == before
