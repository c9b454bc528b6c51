"""Damaged checkpoints, wherever they are kept: all ranks fall back together, and it is set aside.

Each test runs on every backend; that of the command, on those that several processes see."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from seatrial.recovery.errors import (
    CheckpointError,
    DamagedCheckpointError,
    NoValidCheckpointError,
)
from seatrial.recovery.exchange import Exchange

from .places import Place


def torn(place: Place) -> str:
    name = place.shard(2)
    place.write(name, place.read(name)[:-100])
    return name


def flipped(place: Place) -> str:
    name = place.shard(2)
    place.flip(name, -300)
    return name


def grown(place: Place) -> str:
    name = place.shard(2)
    place.write(name, place.read(name) + b"more")
    return name


def removed(place: Place) -> str:
    name = place.shard(2)
    place.remove(name)
    return name


def emptied(place: Place) -> str:
    name = place.shard(2)
    place.write(name, b"")
    return name


def objects_flipped(place: Place) -> str:
    name = place.shard(2).replace(".safetensors", ".json")
    place.flip(name, 20)
    return name


def manifest_flipped(place: Place) -> str:
    name = "step-00000002/manifest.json"
    place.flip(name, 200)
    return "manifest"


def manifest_torn(place: Place) -> str:
    name = "step-00000002/manifest.json"
    place.write(name, place.read(name)[:26])  # as long as a tombstone
    return "manifest"


def manifest_emptied(place: Place) -> str:
    place.write("step-00000002/manifest.json", b"")
    return "manifest"


DAMAGES = [
    torn,
    flipped,
    grown,
    removed,
    emptied,
    objects_flipped,
    manifest_flipped,
    manifest_torn,
    manifest_emptied,
]


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
    def test_all_ranks_fall_back_together_and_the_damaged_step_is_set_aside(
        self,
        place: Place,
        make_state: Any,
        same_tensors: Any,
        run_threads: Any,
        damage: Callable[[Place], str],
    ) -> None:
        store = place.store()
        store.save(make_state(1), step=1)
        store.save(make_state(2), step=2)
        name = damage(place)

        def work(rank: int, exchange: Exchange) -> Any:
            state = make_state(0)
            restored = place.store(exchange=exchange).restore(state)
            assert restored is not None
            assert same_tensors(state, make_state(1))
            return restored.step, restored.damaged

        results = run_threads(2, work)
        assert results[0] == results[1]
        step, ((damaged, reason),) = results[0]
        assert (step, damaged) == (1, 2)
        assert name.rpartition("/")[2] in reason
        report = place.inspect()
        assert report.quarantined == ("step-00000002-1",)
        assert report.latest_published == 1
        note = json.loads(place.read("quarantine/step-00000002-1.json"))
        assert (note["step"], note["reason"]) == (2, reason)

    def test_what_is_in_quarantine_is_kept_and_its_step_can_be_saved_again(
        self, place: Place, make_state: Any, same_tensors: Any
    ) -> None:
        store = place.store(keep_last=1)
        store.save(make_state(1), step=1)
        store.restore(make_state(0))
        store.save(make_state(2), step=2)
        content = place.read(place.shard(2))
        flipped(place)
        damaged = place.read(place.shard(2))
        store.restore(make_state(0))
        for step in (2, 3):
            store.save(make_state(step + 5), step=step)
            store.restore(make_state(0))
        assert store.latest() == 3
        kept = [place.read(name) for name in place.names() if name.endswith(".safetensors")]
        assert damaged in kept
        assert content not in kept
        assert len(kept) == 2
        assert place.inspect().quarantined == ("step-00000002-1",)
        assert place.inspect().leftovers == ()

    def test_a_step_that_is_damaged_twice_is_set_aside_twice(
        self, place: Place, make_state: Any
    ) -> None:
        store = place.store()
        store.save(make_state(1), step=1)
        for _ in range(2):
            store.save(make_state(2), step=2)
            (manifest,) = [
                name
                for name in place.names()
                if name.startswith("step-00000002/manifest") and len(place.read(name)) > 100
            ]
            place.write(manifest, b"{}")
            store.restore(make_state(0))
        assert place.inspect().quarantined == ("step-00000002-1", "step-00000002-2")

    def test_when_all_are_damaged_nothing_is_moved(self, place: Place, make_state: Any) -> None:
        place.store().save(make_state(2), step=2)
        flipped(place)
        before = place.names()
        with pytest.raises(NoValidCheckpointError, match="step 2"):
            place.store().restore(make_state(0))
        assert place.names() == before

    def test_when_only_quarantine_is_left_the_job_does_not_start_anew(
        self, place: Place, make_state: Any
    ) -> None:
        store = place.store()
        store.save(make_state(1), step=1)
        store.save(make_state(2), step=2)
        flipped(place)
        store.restore(make_state(0))
        for name in place.names():
            if name.startswith("step-00000001"):
                place.remove(name)
        with pytest.raises(NoValidCheckpointError, match="quarantine"):
            place.store().restore(make_state(0))

    @pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
    def test_verify_and_inspect_name_what_is_damaged(
        self, place: Place, make_state: Any, damage: Callable[[Place], str]
    ) -> None:
        place.store().save(make_state(2), step=2)
        assert place.store().verify(2) == []
        damage(place)
        assert place.store().verify(2) != []
        (report,) = place.inspect().steps
        assert (report.published, report.valid) == (True, False)
        with pytest.raises((DamagedCheckpointError, CheckpointError)):
            place.store().restore(make_state(0), step=2)


def test_the_command_lists_verifies_and_prunes(
    shared_place: Place, make_state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = shared_place
    if place.server is not None:
        for name, value in place.server.environment.items():
            monkeypatch.setenv(name, value)
    store = place.store(keep_last=3)
    for step in (1, 2, 3):
        store.save(make_state(step), step=step)
    flipped(place)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "seatrial.recovery", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    listed = run("list", place.location, "--json")
    assert listed.returncode == 0, listed.stderr
    assert [row["step"] for row in json.loads(listed.stdout)["steps"]] == [1, 2, 3]
    verified = run("verify", place.location)
    assert verified.returncode == 1
    assert "step 2: damaged" in verified.stdout
    assert "does not match its digest" in verified.stdout
    pruned = run("prune", place.location, "--keep-last", "1")
    assert pruned.returncode == 0
    assert [info.step for info in store.list()] == [3]
