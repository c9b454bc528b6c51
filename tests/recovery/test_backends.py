"""What the store promises, wherever it keeps its checkpoints: a directory, memory, moto, SeaweedFS.

Each test runs on every backend. Damage is in `test_backend_damage`, processes and kills are in
`test_backend_processes`. What is special to one backend is elsewhere: local files in `test_store`
and `test_publish`, answers of servers in `test_s3_answers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

from seatrial.recovery.errors import AlreadyPublishedError, MismatchError, SaveError
from seatrial.recovery.exchange import Exchange

from .announced import fail_at, once_at
from .places import Place

dcp: Any = torch.distributed.checkpoint  # it exports nothing explicitly

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


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
        fail_at(f"checkpoint/{event}", "before", RuntimeError("as the test wants"))
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

        def succeed() -> None:
            assert place.store().restore(make_state(0)).step == 1

        once_at("checkpoint/manifest/link", "before", succeed)
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
        def overtake() -> None:
            store = place.store(keep_last=1)
            for step in (1, 2, 3):
                store.save(make_state(step), step=step)
                store.restore(make_state(0))

        once_at("checkpoint/manifest/link", "before", overtake)
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
