"""Several ranks: kills at every event, races, zombies, errors on one rank, sharing the writing.

Ranks are forked processes where they are killed. What survives a power cut is not tested here: a
killed process loses nothing that the kernel has.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from seatrial.recovery import CheckpointStore, inspect_store
from seatrial.recovery.errors import AlreadyPublishedError, SaveError
from seatrial.recovery.exchange import Exchange
from seatrial.recovery.probe import listen


def kill_at_nth(nth: int, what: str) -> None:
    """SIGKILL this process at the nth announcement of an event that starts with ``what``."""
    left = nth

    def listener(event: str, edge: str, facts: dict[str, object]) -> None:
        nonlocal left
        left -= event.startswith(what)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    listen(listener)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_at_any_event_of_a_save_leaves_the_old_or_the_new(
    tmp_path: Path,
    fork_ranks: Callable[..., list[Any]],
    make_state: Any,
    same_tensors: Any,
    victim: int,
) -> None:
    published: list[int] = []
    # Ends by itself: with the first run in which nothing was left to kill.
    for nth in range(1, 1000):
        directory = tmp_path / f"store-{nth}"
        acknowledged = tmp_path / f"acknowledged-{nth}"

        def work(
            rank: int,
            exchange: Exchange,
            nth: int = nth,
            directory: Path = directory,
            acknowledged: Path = acknowledged,
        ) -> None:
            store = CheckpointStore(directory, exchange=exchange)
            store.save(make_state(1, rank), step=1)
            if rank == victim:
                kill_at_nth(nth, "checkpoint")
            store.save(make_state(2, rank), step=2)
            acknowledged.touch()

        results = fork_ranks(2, work)
        report = inspect_store(directory)
        assert report.steps[0].valid
        assert all(step.valid for step in report.steps if step.published), (nth, report)
        newest = report.latest_valid or 0
        assert newest == 2 or not acknowledged.exists()
        published.append(newest)
        state = make_state(0)
        restored = CheckpointStore(directory).restore(state)
        assert restored is not None
        assert (restored.step, restored.damaged) == (newest, ())
        assert same_tensors(state, make_state(newest))
        assert inspect_store(directory).leftovers == ()
        if results == [None, None]:
            break
        assert results[victim] == -signal.SIGKILL
    if victim == 0:
        # A kill of the coordinator that comes later never loses what an earlier one kept. After
        # the other rank's report it is open whether the coordinator gets to publish.
        assert published == sorted(published)
    assert nth > (24 if victim == 0 else 14)
    assert published[0] == 1
    assert published[-1] == 2


@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_at_any_event_of_a_restore_changes_nothing_for_the_next(
    tmp_path: Path, fork_ranks: Callable[..., list[Any]], make_state: Any, victim: int
) -> None:
    directory = tmp_path / "store"
    for step in (1, 2, 3):
        CheckpointStore(directory, keep_last=3).save(make_state(step), step=step)
    for file in directory.glob("step-00000003/attempt-*/*.json"):
        file.unlink()
    for nth in range(1, 1000):

        def work(rank: int, exchange: Exchange, nth: int = nth) -> object:
            if rank == victim:
                kill_at_nth(nth, "restore")
            restored = CheckpointStore(directory, exchange=exchange, keep_last=3).restore(
                make_state(0)
            )
            return restored and restored.step

        results = fork_ranks(2, work)
        report = inspect_store(directory)
        assert report.latest_valid == 2
        if results == [2, 2]:
            break
        assert results[victim] == -signal.SIGKILL
    assert nth > 10
    assert [step.step for step in report.steps] == [1, 2]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_many_ranks_saved_comes_back_on_each(
    tmp_path: Path,
    run_threads: Callable[..., list[Any]],
    make_state: Any,
    same_tensors: Any,
    world: int,
) -> None:
    def work(rank: int, exchange: Exchange) -> None:
        store = CheckpointStore(tmp_path, exchange=exchange)
        manifest = store.save(make_state(1, rank), step=1)
        assert manifest.world_size == world
        state = make_state(0, rank)
        assert store.restore(state)
        assert same_tensors(state, make_state(1))
        shared, ranks, own = state.loaded
        assert shared == make_state(1).shared
        assert own == rank
        assert {number: objects["rank"] for number, objects in ranks.items()} == {
            number: number for number in range(world)
        }

    assert run_threads(world, work) == [None] * world


def test_equal_copies_are_written_once_and_the_bytes_are_shared_out(
    tmp_path: Path, run_threads: Callable[..., list[Any]], make_state: Any
) -> None:
    def work(_rank: int, exchange: Exchange) -> object:
        state = make_state(1)
        state.live = {f"t{n}": torch.full((100,), float(n)) for n in range(8)}
        return CheckpointStore(tmp_path, exchange=exchange).save(state, step=1)

    first, second = run_threads(2, work)
    assert first == second
    written = [
        sum(c.length for t in first.tensors for c in t.chunks if c.file == shard.name)
        for shard in first.shards
    ]
    assert written == [1600, 1600]


def test_a_layout_that_changes_on_one_rank_is_assigned_anew(
    tmp_path: Path, run_threads: Callable[..., list[Any]], make_state: Any, same_tensors: Any
) -> None:
    def work(rank: int, exchange: Exchange) -> None:
        store = CheckpointStore(tmp_path, exchange=exchange, keep_last=9)
        for step in range(1, 7):
            state = make_state(step)
            if step >= 3 and rank == 1:
                state.live["only on 1"] = torch.arange(step)
            if step == 5 and rank == 0:
                del state.live["half"]
            manifest = store.save(state, step=step)
            assert ("only on 1" in {t.name for t in manifest.tensors}) == (step >= 3)

    assert run_threads(2, work) == [None] * 2
    for step in (1, 2):
        state = make_state(0)
        CheckpointStore(tmp_path, keep_last=9).restore(state, step=step)
        assert same_tensors(state, make_state(step))
    state = make_state(0)
    state.live["only on 1"] = torch.zeros((), dtype=torch.int64).expand(6).clone()
    CheckpointStore(tmp_path).restore(state, step=6)
    assert torch.equal(state.live["half"], make_state(6).live["half"])


EVERY_RANK = ["shard/write", "shard/fsync", "directory/fsync", "report", "acknowledge"]
COORDINATOR = [*EVERY_RANK, "gather", "manifest/link", "manifest/directory"]


@pytest.mark.parametrize("edge", ["before", "after"])
@pytest.mark.parametrize(
    ("culprit", "event"), [(0, name) for name in COORDINATOR] + [(1, name) for name in EVERY_RANK]
)
def test_an_error_on_one_rank_is_heard_by_all_and_the_next_save_works(
    tmp_path: Path,
    fork_ranks: Callable[..., list[Any]],
    make_state: Any,
    event: str,
    edge: str,
    culprit: int,
) -> None:
    def work(rank: int, exchange: Exchange) -> object:
        store = CheckpointStore(tmp_path / "store", exchange=exchange)
        store.save(make_state(1, rank), step=1)

        def listener(name: str, at: str, facts: dict[str, object]) -> None:
            if (name, at) == (f"checkpoint/{event}", edge):
                stop()
                raise OSError(28, "No space left on device")

        stop = listen(listener) if rank == culprit else lambda: None
        text = ""
        try:
            store.save(make_state(2, rank), step=2)
        except SaveError as error:
            text = str(error)
        published = 2 in [info.step for info in store.list()]
        store.save(make_state(3, rank), step=3)
        return text, published

    results = fork_ranks(2, work)
    texts = [text for text, _ in results]
    published = results[culprit][1]
    assert f"rank {culprit}" in texts[culprit]
    assert "No space left" in texts[culprit]
    # The other rank may only return where the checkpoint is there for good.
    assert f"rank {culprit}" in texts[1 - culprit] or published
    assert inspect_store(tmp_path / "store").latest_valid == 3


def test_ranks_that_save_different_steps_are_told(
    tmp_path: Path, run_threads: Callable[..., list[Any]], make_state: Any
) -> None:
    def work(rank: int, exchange: Exchange) -> None:
        CheckpointStore(tmp_path, exchange=exchange).save(make_state(1), step=rank)

    for error in run_threads(2, work):
        assert isinstance(error, SaveError)
        assert "different steps: {0: 0, 1: 1}" in str(error)


def test_ranks_that_disagree_on_a_shape_are_told_which_tensor(
    tmp_path: Path, run_threads: Callable[..., list[Any]], make_state: Any
) -> None:
    def work(rank: int, exchange: Exchange) -> None:
        state = make_state(1)
        state.live["half"] = torch.zeros(rank + 1)
        CheckpointStore(tmp_path, exchange=exchange).save(state, step=1)

    for error in run_threads(2, work):
        assert isinstance(error, SaveError)
        assert "tensor 'half' is float32[1] on rank 0 and float32[2] on rank 1" in str(error)


def test_tensors_that_different_ranks_hold_are_restored_where_they_are_wanted(
    tmp_path: Path, run_threads: Callable[..., list[Any]], make_state: Any
) -> None:
    def stage(rank: int, seed: float) -> Any:
        state = make_state(1)
        state.live = {f"layer.{rank}": torch.full((3,), seed + rank)}
        return state

    def work(rank: int, exchange: Exchange) -> None:
        store = CheckpointStore(tmp_path, exchange=exchange)
        store.save(stage(rank, 5), step=1)
        state = stage(1 - rank, 0)
        store.restore(state)
        assert torch.equal(state.live[f"layer.{1 - rank}"], torch.full((3,), 6.0 - rank))

    assert run_threads(2, work) == [None] * 2


# Attempts that do not know of each other


def test_of_two_attempts_that_publish_the_same_step_exactly_one_wins(
    tmp_path: Path, fork_ranks: Callable[..., list[Any]], make_state: Any, same_tensors: Any
) -> None:
    directory, both = tmp_path / "store", tmp_path / "both"
    both.mkdir()

    def meet(event: str, edge: str, facts: dict[str, object]) -> None:
        if (event, edge) == ("checkpoint/manifest/link", "before"):
            (both / str(os.getpid())).touch()
            while len(list(both.iterdir())) < 2:
                time.sleep(0.001)

    def work(rank: int, _exchange: Exchange) -> object:
        listen(meet)
        return CheckpointStore(directory).save(make_state(rank + 1), step=7).attempt

    results = fork_ranks(2, work)
    winners = [rank for rank in (0, 1) if isinstance(results[rank], str)]
    assert len(winners) == 1
    loser = results[1 - winners[0]]
    assert isinstance(loser, AlreadyPublishedError)
    report = inspect_store(directory)
    assert (report.latest_valid, report.steps[0].attempt) == (7, results[winners[0]])
    state = make_state(0)
    restored = CheckpointStore(directory).restore(state)
    assert restored is not None
    assert same_tensors(state, make_state(winners[0] + 1))
    assert len(restored.collected) <= 1
    assert inspect_store(directory).leftovers == ()


@pytest.mark.parametrize(
    "event",
    [
        "checkpoint/shard/write",
        "checkpoint/shard/fsync",
        "checkpoint/directory/fsync",
        "checkpoint/gather",
        "checkpoint/manifest/write",
        "checkpoint/manifest/fsync",
        "checkpoint/manifest/link",
    ],
)
@pytest.mark.parametrize("successor_saves", [True, False])
def test_a_zombie_that_goes_on_late_cannot_touch_the_winner(
    tmp_path: Path,
    make_state: Any,
    same_tensors: Any,
    event: str,
    successor_saves: bool,
) -> None:
    """The zombie sleeps in the middle of its save, while a new attempt resumes and collects."""
    CheckpointStore(tmp_path).save(make_state(1), step=1)

    def take_over(name: str, edge: str, facts: dict[str, object]) -> None:
        if (name, edge) == (event, "before"):
            stop()
            successor = CheckpointStore(tmp_path)
            assert successor.restore(make_state(0))
            if successor_saves:
                successor.save(make_state(3), step=2)

    stop = listen(take_over)
    with pytest.raises(SaveError):
        CheckpointStore(tmp_path).save(make_state(2), step=2)
    report = inspect_store(tmp_path)
    assert all(step.valid for step in report.steps if step.published)
    assert report.latest_valid == (2 if successor_saves else 1)
    state = make_state(0)
    restored = CheckpointStore(tmp_path).restore(state)
    assert restored is not None
    assert restored.damaged == ()
    assert same_tensors(state, make_state(3 if successor_saves else 1))


def test_a_zombie_cannot_publish_into_the_directory_of_its_successor(
    tmp_path: Path, make_state: Any, same_tensors: Any
) -> None:
    """It wakes up when its files were collected and the successor is about to publish."""
    CheckpointStore(tmp_path).save(make_state(1), step=1)
    asleep, wake = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def zombie() -> None:
        try:
            CheckpointStore(tmp_path).save(make_state(2), step=2)
        except SaveError as error:
            errors.append(error)

    thread = threading.Thread(target=zombie)

    def listener(event: str, edge: str, facts: dict[str, object]) -> None:
        of_zombie = threading.current_thread() is thread
        if of_zombie and (event, edge) == ("checkpoint/gather", "after"):
            asleep.set()
            wake.wait()
        if not of_zombie and (event, edge) == ("checkpoint/manifest/link", "before"):
            wake.set()
            thread.join()

    stop = listen(listener)
    thread.start()
    asleep.wait()
    successor = CheckpointStore(tmp_path)
    restored = successor.restore(make_state(0))
    assert restored is not None
    assert restored.collected == ("step-00000002",)
    successor.save(make_state(3), step=2)
    stop()
    assert len(errors) == 1
    assert inspect_store(tmp_path).latest_valid == 2
    state = make_state(0)
    successor.restore(state)
    assert same_tensors(state, make_state(3))
