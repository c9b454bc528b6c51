"""Several processes on one store that all of them see: a directory, moto, SeaweedFS.

Ranks save and restore together, attempts that were taken for dead go on, and a save is killed at
every point that its protocol announces. What a server does when it is killed itself is not
tested."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint

from seatrial.recovery import CheckpointStore
from seatrial.recovery.errors import SaveError
from seatrial.recovery.exchange import Exchange
from seatrial.recovery.storage import s3_client, s3_upload
from seatrial.recovery.storage.retry import RetryPolicy

from .places import Place
from .processes import Process, signal_at

dcp: Any = torch.distributed.checkpoint  # it exports nothing explicitly


def save_two_steps(place: Place, exchange: Exchange, make_state: Any) -> CheckpointStore:
    store = place.store(exchange=exchange)
    for step in (1, 2):
        store.save(make_state(step), step=step)
    return store


def test_two_ranks_save_and_restore_bitwise(
    shared_place: Place, make_state: Any, same_tensors: Any, fork_ranks: Any
) -> None:
    place = shared_place

    def work(rank: int, exchange: Exchange) -> Any:
        store = save_two_steps(place, exchange, make_state)
        state = make_state(0)
        restored = store.restore(state)
        assert restored is not None
        return restored.step, bool(same_tensors(state, make_state(2)))

    assert fork_ranks(2, work) == [(2, True), (2, True)]
    report = place.inspect()
    assert (report.latest_valid, report.leftovers) == (2, ())
    assert report.steps[-1].world_size == 2


def test_two_ranks_save_and_load_through_dcp(
    shared_place: Place, make_state: Any, fork_ranks: Any
) -> None:
    place = shared_place

    def work(rank: int, exchange: Exchange) -> bool:
        saved = {"tensors": dict(make_state(1).live), "epoch": 3}
        dcp.save(saved, storage_writer=place.writer(4))
        loaded = {"tensors": dict(make_state(2).live), "epoch": 0}
        dcp.load(loaded, storage_reader=place.reader())
        dist.destroy_process_group()
        return loaded["epoch"] == 3 and all(
            torch.equal(value, saved["tensors"][name]) for name, value in loaded["tensors"].items()
        )

    assert fork_ranks(2, work, process_group=True) == [True, True]
    assert place.inspect().latest_valid == 4


def test_ranks_that_fall_back_do_so_together(
    shared_place: Place, make_state: Any, same_tensors: Any, fork_ranks: Any
) -> None:
    place = shared_place

    def save(rank: int, exchange: Exchange) -> None:
        save_two_steps(place, exchange, make_state)

    def restore(rank: int, exchange: Exchange) -> Any:
        state = make_state(0)
        restored = place.store(exchange=exchange).restore(state)
        assert restored is not None
        return restored.step, bool(same_tensors(state, make_state(1)))

    fork_ranks(2, save)
    place.flip(place.shard(2, rank=1), -1)
    assert fork_ranks(2, restore) == [(1, True), (1, True)]
    assert place.inspect().quarantined == ("step-00000002-1",)


EVENTS = [
    "checkpoint",
    "checkpoint/shard/write",
    "checkpoint/report",
    "checkpoint/gather",
    "checkpoint/manifest/link",
    "checkpoint/acknowledge",
    "checkpoint/collect",
]


@pytest.mark.parametrize("edge", ["before", "after"])
@pytest.mark.parametrize("event", EVENTS)
def test_a_kill_at_any_point_leaves_the_previous_checkpoint_or_the_whole_new_one(
    s3_place: Place, make_state: Any, same_tensors: Any, fork_ranks: Any, event: str, edge: str
) -> None:
    place = s3_place
    place.store().save(make_state(1), step=1)

    def work(rank: int, exchange: Exchange) -> None:
        signal_at(event, edge, signal.SIGKILL)
        place.store(exchange=exchange).save(make_state(2), step=2)

    assert fork_ranks(1, work) == [-signal.SIGKILL]
    position = 2 * EVENTS.index(event) + (edge == "after")
    link = 2 * EVENTS.index("checkpoint/manifest/link")
    published = position > link or (event, edge) == ("checkpoint", "after")
    expected = 2 if published else 1
    state = make_state(0)
    store = place.store()
    restored = store.restore(state)
    assert restored is not None
    assert (restored.step, restored.damaged) == (expected, ())
    assert same_tensors(state, make_state(expected))
    assert place.inspect().leftovers == ()
    if not published:
        assert store.save(make_state(3), step=2).parent_step == 1
        assert store.latest() == 2


def test_a_kill_amid_a_large_upload_leaves_it_to_the_next_collection(
    s3_place: Place, make_state: Any, fork_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = s3_place
    monkeypatch.setattr(s3_upload, "PART_BYTES", 5 << 20)
    small, large = make_state(1), make_state(2)
    place.store().save(small, step=1)
    large.live["large"] = torch.zeros(4 << 20)
    real = s3_upload.S3Sink.finish

    def work(rank: int, exchange: Exchange) -> None:
        def finish(sink: s3_upload.S3Sink) -> None:
            if sink._parts:
                sink._parts[0].result()
                os.kill(os.getpid(), signal.SIGKILL)
            real(sink)

        s3_upload.S3Sink.finish = finish  # type: ignore[method-assign]
        place.store(exchange=exchange).save(large, step=2)

    assert fork_ranks(1, work) == [-signal.SIGKILL]
    assert len(place.uploads()) == 1
    leftovers = place.inspect().leftovers
    assert "step-00000002" in leftovers
    assert any("rank-00000.safetensors (unfinished upload" in each for each in leftovers)
    restored = place.store().restore(make_state(0))
    assert restored is not None
    assert restored.collected == leftovers
    assert place.uploads() == []


@pytest.mark.parametrize("successor_saves", [True, False])
@pytest.mark.parametrize("event", ["shard/write", "gather", "manifest/link"])
def test_a_zombie_that_goes_on_late_cannot_touch_the_winner(
    s3_place: Place,
    fork: Callable[..., Process],
    make_state: Any,
    same_tensors: Any,
    event: str,
    successor_saves: bool,
) -> None:
    place = s3_place
    place.store().save(make_state(1), step=1)

    def work() -> str:
        signal_at(f"checkpoint/{event}", "before", signal.SIGSTOP)
        return place.store().save(make_state(2), step=2).attempt

    zombie = fork(work)
    zombie.wait_until_stopped()
    successor = place.store()
    assert successor.restore(make_state(0)).step == 1
    if successor_saves:
        successor.save(make_state(3), step=2)
    zombie.send(signal.SIGCONT)
    error = zombie.result()
    assert isinstance(error, SaveError), repr(error)
    state = make_state(0)
    expected = 2 if successor_saves else 1
    restored = place.store().restore(state)
    assert restored is not None
    assert (restored.step, restored.damaged) == (expected, ())
    assert same_tensors(state, make_state(3 if successor_saves else 1))
    assert place.inspect().leftovers == ()


def test_of_two_jobs_that_publish_at_the_same_time_exactly_one_wins(
    s3_place: Place,
    fork: Callable[..., Process],
    make_state: Any,
    same_tensors: Any,
) -> None:
    place = s3_place

    def work(number: int) -> Callable[[], str]:
        def run() -> str:
            signal_at("checkpoint/manifest/link", "before", signal.SIGSTOP)
            return place.store().save(make_state(number), step=1).attempt

        return run

    jobs = [fork(work(number)) for number in (1, 2)]
    for job in jobs:
        job.wait_until_stopped()
    for job in jobs:
        job.send(signal.SIGCONT)
    results = [job.result() for job in jobs]
    (winner,) = [number for number, result in enumerate(results) if isinstance(result, str)]
    assert isinstance(results[1 - winner], SaveError), results
    state = make_state(0)
    assert place.store().restore(state).damaged == ()
    assert same_tensors(state, make_state(winner + 1))


def test_a_store_that_was_used_before_a_fork_works_after_it(
    s3_place: Place, make_state: Any, fork_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the parent: a child that closed its connections would leave it waiting."""
    once = RetryPolicy(total_s=0.1, wait_first_s=0.01, wait_max_s=0.01)
    monkeypatch.setattr(s3_client, "REMOTE", once)
    store = s3_place.store()
    store.save(make_state(1), step=1)

    def work(rank: int, exchange: Exchange) -> int | None:
        found = s3_place.store().latest()
        gc.collect()
        return found if found == store.latest() else None

    for _ in range(3):
        assert fork_ranks(2, work) == [1, 1]
        assert store.latest() == 1


def test_ranks_that_see_different_stores_publish_nothing(
    moto_place: Place, make_state: Any, fork_ranks: Any
) -> None:
    """As ranks with a directory of their own would, or several processes with memory://."""

    def work(rank: int, exchange: Exchange) -> Any:
        place = moto_place if rank == 0 else Place(f"{moto_place.location}-2", moto_place.options)
        place.store(exchange=exchange).save(make_state(1, rank), step=1)

    results = fork_ranks(2, work)
    assert all(isinstance(error, SaveError) for error in results), results
    assert "do all ranks write to the same storage?" in str(results[0])
    assert moto_place.inspect().latest_published is None


def test_a_listener_is_told_of_the_manifest_by_its_url(
    moto_place: Place, make_state: Any, announcements: Any
) -> None:
    moto_place.store().save(make_state(1), step=1)
    (file,) = {facts["file"] for name, _, facts in announcements if name.endswith("/link")}
    assert file == f"{moto_place.location}/step-00000001/manifest.json"
