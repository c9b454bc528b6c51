"""One rank's view of the store: what is saved comes back, and what is announced on the way.

Errors are in `test_store_errors`, retention in `test_store_retention`; kills, several ranks and
damage have modules of their own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from seatrial.recovery import CheckpointStore, inspect_store
from seatrial.recovery.errors import CheckpointError

from .announced import COMMIT

RESTORE = [
    "restore/manifest/read",
    "restore/shard/read",
    "restore/shard/read",
    "restore/agree",
    "restore/load",
    "restore",
    "checkpoint/collect",
]


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


def test_a_step_without_a_manifest_is_never_resumed_from(
    store: CheckpointStore, make_state: Any
) -> None:
    for step in (1, 2):
        store.save(make_state(step), step=step)
    (store.directory / "step-00000002/manifest.json").unlink()
    assert store.latest() == 1
    restored = store.restore(make_state(0))
    assert restored is not None
    assert (restored.step, restored.damaged) == (1, ())


def test_inspecting_writes_nothing(store: CheckpointStore, make_state: Any) -> None:
    store.save(make_state(1), step=1)
    before = sorted(os.walk(store.directory))
    report = inspect_store(store.directory)
    assert (report.latest_valid, report.latest_published) == (1, 1)
    assert report.steps[0].attempt == store.list()[0].attempt
    assert sorted(os.walk(store.directory)) == before
