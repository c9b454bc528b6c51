"""Errors of one rank's store name their cause, and nothing that was saved is lost by them.

Errors of several ranks are in `test_store_ranks`, damage is in `test_damage`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from seatrial.recovery import CheckpointStore, inspect_store
from seatrial.recovery.errors import (
    AlreadyPublishedError,
    CheckpointError,
    MismatchError,
    NoValidCheckpointError,
    SaveError,
)
from seatrial.recovery.probe import listen

from .announced import COMMIT, fail_at


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
