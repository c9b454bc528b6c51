"""What one rank's store keeps, and what it deletes: old checkpoints, and leftovers of saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seatrial.recovery import CheckpointStore, inspect_store
from seatrial.recovery.errors import SaveError
from seatrial.recovery.probe import listen

from .announced import fail_at


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
