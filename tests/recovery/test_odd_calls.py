"""Odd calls of the store: steps and rules that are none, targets that share memory, manifests that
cannot be read at the moment. All are refused; nothing is overwritten, written or passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from seatrial.recovery import CheckpointStore, SeatrialReader, SeatrialWriter
from seatrial.recovery.digest import digest
from seatrial.recovery.errors import CheckpointError, MismatchError
from seatrial.recovery.probe import interpose

dcp: Any = torch.distributed.checkpoint  # it exports nothing explicitly

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "store")


def test_elements_that_share_memory_are_not_read_over_each_other(
    store: CheckpointStore, make_state: Any
) -> None:
    state = make_state(1)
    store.save(state, step=1)
    base = torch.zeros(40, 1)
    state.live["weight"] = base.expand(40, 30)
    with pytest.raises(MismatchError, match="weight shows one place of memory as several elements"):
        store.restore(state)
    assert not base.any()
    target = {"weight": base.expand(40, 30)}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(target, storage_reader=SeatrialReader(store.directory))
    assert "one place of memory" in str(caught.value.failures[0][0])
    assert not base.any()


@pytest.mark.parametrize("same", [True, False])
def test_one_tensor_under_two_names_is_not_restored_from_two(
    store: CheckpointStore, make_state: Any, same: bool
) -> None:
    state = make_state(1)
    state.live |= {"head": torch.ones(3), "tied": torch.full((3,), 1.0 if same else 2.0)}
    store.save(state, step=1)
    state.live["head"] = state.live["tied"] = torch.zeros(3)
    if same:
        store.restore(state)
        assert state.live["head"].tolist() == [1, 1, 1]
    else:
        with pytest.raises(MismatchError, match="head and tied are one tensor here, and hold oth"):
            store.restore(state)
        assert not state.live["head"].any()


@pytest.mark.parametrize(
    "view",
    [
        lambda: torch.zeros(30, 40).t(),
        lambda: torch.zeros(80, 60)[::2, ::2],
        lambda: torch.zeros(40, 2, 30)[:, 1],
        lambda: torch.zeros(1).expand(1, 1),
        lambda: torch.zeros(60, 40).as_strided((40, 30), (1, 80)),
        lambda: torch.zeros(41, 41).diagonal(),
    ],
)
def test_a_view_that_shares_nothing_within_itself_is_filled(
    store: CheckpointStore, make_state: Any, view: Any
) -> None:
    state = make_state(1)
    wanted = torch.randn(view().shape)
    state.live["view"] = wanted
    store.save(state, step=1)
    state.live["view"] = view()
    store.restore(state)
    assert torch.equal(state.live["view"], wanted)


@pytest.mark.parametrize("refusal", [PermissionError(13, "Permission denied"), None])
def test_a_newest_manifest_that_cannot_be_read_now_is_not_passed_over(
    store: CheckpointStore, make_state: Any, refusal: Exception | None
) -> None:
    store.save(make_state(1), step=1)
    manifest = store.save(make_state(2), step=2)
    path = store.directory / "step-00000002" / "manifest.json"
    if refusal is None:
        other = manifest.to_bytes().replace(b'"version":1', b'"version":7')
        body = other[other.index(b'"manifest":') + len('"manifest":') : -2]
        path.write_bytes(b'{"digest":"%s","manifest":%s}\n' % (digest(body).encode(), body))

    class Refuse:
        def perform(self, event: str, do: Any, data: Any, lost: Any, facts: Any) -> Any:
            if refusal is not None and facts["file"] == str(path) and event == "storage/read":
                raise refusal
            return do(data)

    stop = interpose(Refuse())
    with pytest.raises(CheckpointError, match=r"Permission denied|format version 7"):
        store.latest()
    stop()
    path.write_bytes(b"damaged")
    assert store.latest() == 1


def test_a_step_may_be_any_whole_number_type(store: CheckpointStore, make_state: Any) -> None:
    manifest = store.save(make_state(1), step=np.int64(7))
    assert (manifest.step, type(manifest.step)) == (7, int)
    assert store.restore(make_state(0), step=np.int64(7)).step == 7  # type: ignore[union-attr]


@pytest.mark.parametrize("step", [True, 3.0, "3", -1, 1 << 63, None])
def test_what_is_no_step_is_refused_before_anything_is_written(
    store: CheckpointStore, make_state: Any, step: Any
) -> None:
    with pytest.raises(ValueError, match=r"^step is .*; a step is "):
        store.save(make_state(1), step=step)
    with pytest.raises(ValueError, match=r"^step is .*; a step is "):
        SeatrialWriter(store.directory, step=step)
    assert not store.directory.exists()


@pytest.mark.parametrize("rule", [{"keep_last": 1.5}, {"keep_last": True}, {"keep_every": "10"}])
def test_a_rule_of_retention_is_of_whole_numbers(tmp_path: Path, rule: Any) -> None:
    with pytest.raises(ValueError, match="give a whole number"):
        CheckpointStore(tmp_path, **rule)
