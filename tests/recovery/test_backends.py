"""What the store promises, wherever it keeps its checkpoints: a directory, memory, moto, SeaweedFS.

Each test runs on every backend. What is special to one is elsewhere: local files in `test_store`
and `test_publish`, object stores in `test_object_stores`, answers of servers in `test_s3_answers`.
Processes and kills are in `test_backend_processes`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

from seatrial.recovery.errors import (
    AlreadyPublishedError,
    CheckpointError,
    DamagedCheckpointError,
    MismatchError,
    NoValidCheckpointError,
    SaveError,
)
from seatrial.recovery.exchange import Exchange
from seatrial.recovery.probe import listen

from .places import Place

dcp: Any = torch.distributed.checkpoint  # it exports nothing explicitly

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def fail_at(event: str, error: Exception) -> None:
    def listener(name: str, edge: str, facts: dict[str, object]) -> None:
        if (name, edge) == (event, "before"):
            stop()
            raise error

    stop = listen(listener)


class TestSaveAndRestore:
    def test_what_is_restored_is_bitwise_what_was_saved(
        self, place: Place, make_state: Any, same_tensors: Any
    ) -> None:
        store = place.store()
        manifest = store.save(make_state(1), step=10)
        state = make_state(2)
        restored = place.store().restore(state)
        assert restored is not None
        assert (restored.step, restored.manifest) == (10, manifest)
        assert same_tensors(state, make_state(1))
        assert state.loaded[0] == make_state(1).shared
        assert torch.equal(state.loaded[1][0]["rng"], make_state(1).own["rng"])

    def test_an_empty_place_restores_nothing(self, place: Place, make_state: Any) -> None:
        assert place.store().restore(make_state(1)) is None
        assert place.store().latest() is None
        assert place.inspect().steps == ()
        assert place.names() == []

    def test_the_newest_of_several_is_restored(
        self, place: Place, make_state: Any, same_tensors: Any
    ) -> None:
        store = place.store()
        for step in (1, 2, 3):
            store.save(make_state(step), step=step)
        assert store.latest() == 3
        state = make_state(0)
        assert store.restore(state).step == 3
        assert same_tensors(state, make_state(3))
        assert store.restore(state, step=2).step == 2
        assert same_tensors(state, make_state(2))

    def test_several_ranks_save_and_restore(
        self, place: Place, make_state: Any, same_tensors: Any, run_threads: Any
    ) -> None:
        def work(rank: int, exchange: Exchange) -> bool:
            store = place.store(exchange=exchange)
            store.save(make_state(1), step=1)
            state = make_state(2)
            store.restore(state)
            return bool(same_tensors(state, make_state(1)))

        assert run_threads(2, work) == [True, True]
        assert place.inspect().latest_valid == 1

    def test_a_background_save_has_the_values_of_the_call(
        self, place: Place, make_state: Any, same_tensors: Any
    ) -> None:
        store = place.store()
        state = make_state(1)
        handle = store.save_async(state, step=1)
        state.live["weight"].zero_()
        assert handle.wait(60).step == 1
        store.restore(state)
        assert same_tensors(state, make_state(1))

    def test_another_shape_is_refused_before_anything_is_overwritten(
        self, place: Place, make_state: Any, same_tensors: Any
    ) -> None:
        place.store().save(make_state(1), step=1)
        state = make_state(2)
        state.live["weight"] = torch.zeros(3, 3)
        with pytest.raises(MismatchError):
            place.store().restore(state)
        assert torch.equal(state.live["half"], make_state(2).live["half"])

    def test_dcp_saves_and_loads(self, place: Place, make_state: Any) -> None:
        saved = {"tensors": dict(make_state(1).live), "epoch": 3}
        dcp.save(saved, storage_writer=place.writer(7))
        loaded = {"tensors": dict(make_state(2).live), "epoch": 0}
        dcp.load(loaded, storage_reader=place.reader())
        assert loaded["epoch"] == 3
        assert all(
            torch.equal(value, saved["tensors"][name]) for name, value in loaded["tensors"].items()
        )
        assert place.inspect().latest_valid == 7


class TestPublishing:
    def test_a_step_is_published_once(self, place: Place, make_state: Any) -> None:
        place.store().save(make_state(1), step=1)
        before = {name: place.read(name) for name in place.names()}
        with pytest.raises(AlreadyPublishedError):
            place.store().save(make_state(2), step=1)
        assert {name: place.read(name) for name in place.names()} == before

    def test_of_writers_that_race_to_publish_exactly_one_wins(
        self, place: Place, make_state: Any, same_tensors: Any, run_threads: Any
    ) -> None:
        def work(rank: int, _: Exchange) -> str:
            return str(place.store().save(make_state(rank + 1), step=1).attempt)

        results = run_threads(4, work)
        won = [rank for rank, result in enumerate(results) if isinstance(result, str)]
        assert len(won) == 1, results
        lost = [result for result in results if not isinstance(result, str)]
        assert all(isinstance(error, SaveError) for error in lost), lost
        state = make_state(0)
        assert place.store().restore(state).damaged == ()
        assert same_tensors(state, make_state(won[0] + 1))
        assert place.inspect().leftovers == ()

    @pytest.mark.parametrize("event", ["shard/write", "report", "gather", "manifest/link"])
    def test_a_save_that_fails_publishes_nothing_and_the_next_one_works(
        self, place: Place, make_state: Any, same_tensors: Any, event: str
    ) -> None:
        store = place.store()
        store.save(make_state(1), step=1)
        fail_at(f"checkpoint/{event}", RuntimeError("as the test wants"))
        with pytest.raises(SaveError, match="as the test wants"):
            store.save(make_state(2), step=2)
        assert place.inspect().latest_published == 1
        store.save(make_state(3), step=2)
        state = make_state(0)
        assert place.store().restore(state).step == 2
        assert same_tensors(state, make_state(3))
        assert place.inspect().leftovers == ()

    def test_an_attempt_that_was_taken_for_dead_cannot_publish(
        self, place: Place, make_state: Any, same_tensors: Any
    ) -> None:
        """While it is about to publish, a successor restores and collects what looks dead."""
        place.store().save(make_state(1), step=1)

        def succeed(name: str, edge: str, facts: dict[str, object]) -> None:
            if (name, edge) == ("checkpoint/manifest/link", "before"):
                stop()
                assert place.store().restore(make_state(0)).step == 1

        stop = listen(succeed)
        with pytest.raises(SaveError, match="another attempt has taken over"):
            place.store().save(make_state(2), step=2)
        assert place.inspect().latest_published == 1
        place.store().save(make_state(3), step=2)
        state = make_state(0)
        assert place.store().restore(state).damaged == ()
        assert same_tensors(state, make_state(3))
        assert place.inspect().leftovers == ()

    def test_a_loser_of_a_step_that_was_deleted_meanwhile_cannot_publish_it_anew(
        self, place: Place, make_state: Any
    ) -> None:
        def overtake(name: str, edge: str, facts: dict[str, object]) -> None:
            if (name, edge) == ("checkpoint/manifest/link", "before"):
                stop()
                store = place.store(keep_last=1)
                for step in (1, 2, 3):
                    store.save(make_state(step), step=step)
                    store.restore(make_state(0))

        stop = listen(overtake)
        with pytest.raises(SaveError):
            place.store().save(make_state(9), step=1)
        report = place.inspect()
        assert [step.step for step in report.steps if step.published] == [3]
        assert all(step.valid for step in report.steps if step.published)

    def test_a_step_that_was_deleted_can_be_saved_again(
        self, place: Place, make_state: Any, same_tensors: Any
    ) -> None:
        store = place.store(keep_last=1)
        for step in (1, 2):
            store.save(make_state(step), step=step)
            store.restore(make_state(0))
        assert [info.step for info in store.list()] == [2]
        place.store(keep_last=5).save(make_state(7), step=1)
        state = make_state(0)
        place.store().restore(state, step=1)
        assert same_tensors(state, make_state(7))
        assert place.inspect().leftovers == ()


def flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


def torn(place: Place) -> str:
    name = place.shard(2)
    place.write(name, place.read(name)[:-100])
    return name


def flipped(place: Place) -> str:
    name = place.shard(2)
    place.write(name, flip(place.read(name), len(place.read(name)) - 300))
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
    place.write(name, flip(place.read(name), 20))
    return name


def manifest_flipped(place: Place) -> str:
    name = "step-00000002/manifest.json"
    place.write(name, flip(place.read(name), 200))
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


class TestRetention:
    def test_the_previous_is_deleted_only_after_a_newer_was_restored(
        self, place: Place, make_state: Any
    ) -> None:
        store = place.store(keep_last=1)
        store.save(make_state(1), step=1)
        store.restore(make_state(0))
        store.save(make_state(2), step=2)
        assert [info.step for info in store.list()] == [1, 2]
        store.restore(make_state(0))
        assert [(info.step, info.verified) for info in store.list()] == [(2, True)]
        assert not [name for name in place.names() if "step-00000001/attempt" in name]

    def test_every_nth_step_is_kept(self, place: Place, make_state: Any) -> None:
        store = place.store(keep_last=1, keep_every=10)
        for step in (5, 10, 15, 20, 25):
            store.save(make_state(step), step=step)
            store.restore(make_state(0))
        assert [info.step for info in store.list()] == [10, 20, 25]

    def test_prune_deletes_leftovers_and_nothing_else(self, place: Place, make_state: Any) -> None:
        store = place.store()
        store.save(make_state(1), step=1)
        before = place.names()
        dead = "attempt-0123456789abcdef/rank-00000.json"
        place.write(f"step-00000001/{dead}", b"{}") if not place.has_fsync else None
        place.write("notes.txt", b"not ours") if not place.has_fsync else None
        store.prune()
        kept = [name for name in place.names() if "verified" not in name and name != "notes.txt"]
        assert kept == before
        assert place.inspect().leftovers == ()

    def test_inspecting_writes_nothing(self, place: Place, make_state: Any) -> None:
        place.store().save(make_state(1), step=1)
        before = {name: place.read(name) for name in place.names()}
        report = place.inspect()
        assert (report.latest_valid, report.steps[0].parent_step) == (1, None)
        assert {name: place.read(name) for name in place.names()} == before

    def test_what_lies_beside_the_steps_is_not_touched(self, place: Place, make_state: Any) -> None:
        store = place.store(keep_last=1)
        store.save(make_state(1), step=1)
        place.write("step-notes", b"mine")
        for step in (2, 3):
            store.save(make_state(step), step=step)
            store.restore(make_state(0))
        assert place.read("step-notes") == b"mine"


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


def test_events_are_those_of_the_protocol_without_what_an_object_store_has_no_use_for(
    place: Place, make_state: Any, announcements: Any
) -> None:
    place.store().save(make_state(1), step=1)
    begun = [name for name, edge, _ in announcements if edge == "before"]
    durable = {
        "checkpoint/shard/fsync",
        "checkpoint/directory/fsync",
        "checkpoint/manifest/write",
        "checkpoint/manifest/fsync",
        "checkpoint/manifest/directory",
    }
    expected = [
        "checkpoint",
        "checkpoint/shard/write",
        "checkpoint/shard/write",
        "checkpoint/report",
        "checkpoint/gather",
        "checkpoint/manifest/link",
        "checkpoint/acknowledge",
        "checkpoint/collect",
    ]
    assert [name for name in begun if name not in durable] == expected
    assert durable <= set(begun) if place.has_fsync else not durable & set(begun)
    files = [str(facts["file"]) for _, _, facts in announcements if "file" in facts]
    assert all(file.startswith(place.location) for file in files)
