"""Attempts that do not know of each other, as real processes: zombies that are stopped and go on
late, jobs that share a directory by mistake, coordinators that die or race.

Exactly one wins, the others get an error that says so, and nothing is torn. What a zombie can do
that is stopped inside of a system call is not tested: signals strike between the announced points.
Several ranks that go through `torch.distributed.checkpoint` are in `test_dcp_ranks`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.api import CheckpointException

from seatrial.recovery import CheckpointStore, SeatrialWriter, inspect_store
from seatrial.recovery.errors import AlreadyPublishedError, SaveError
from seatrial.recovery.exchange import StoreExchange
from seatrial.recovery.probe import listen

from .processes import Process, signal_at

dcp: Any = torch.distributed.checkpoint  # it exports nothing explicitly

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

Save = Callable[[Path, Any, int], str]


def by_store(directory: Path, state: Any, step: int) -> str:
    return CheckpointStore(directory).save(state, step=step).attempt


def by_dcp(directory: Path, state: Any, step: int) -> str:
    try:
        dcp.save(dict(state.live), storage_writer=SeatrialWriter(directory, step=step))
    except CheckpointException as error:
        raise error.failures[0][0] from None
    return ""


SAVERS = pytest.mark.parametrize("save", [by_store, by_dcp])


@SAVERS
@pytest.mark.parametrize("successor_saves", [True, False])
@pytest.mark.parametrize(
    "event",
    ["shard/write", "shard/fsync", "directory/fsync", "manifest/write", "manifest/link"],
)
def test_a_zombie_that_was_stopped_and_goes_on_late_cannot_touch_the_winner(
    directory: Path,
    fork: Callable[..., Process],
    make_state: Any,
    same_tensors: Any,
    save: Save,
    event: str,
    successor_saves: bool,
) -> None:
    by_store(directory, make_state(1), 1)

    def work() -> str:
        signal_at(f"checkpoint/{event}", "before", signal.SIGSTOP)
        return save(directory, make_state(2), 2)

    zombie = fork(work)
    zombie.wait_until_stopped()
    successor = CheckpointStore(directory)
    restored = successor.restore(make_state(0))
    assert restored is not None
    assert restored.step == 1
    if successor_saves:
        successor.save(make_state(3), step=2)
    before = published_files(directory)
    zombie.send(signal.SIGCONT)
    error = zombie.result()
    assert isinstance(error, SaveError), repr(error)
    assert "step-00000002" in str(error) or "step 2" in str(error)
    assert published_files(directory) == before
    state = make_state(0)
    again = CheckpointStore(directory).restore(state)
    assert again is not None
    assert (again.step, again.damaged) == (2 if successor_saves else 1, ())
    assert same_tensors(state, make_state(3 if successor_saves else 1))
    assert inspect_store(directory).leftovers == ()


def published_files(directory: Path) -> dict[str, bytes]:
    """Everything that belongs to a published step."""
    found: dict[str, bytes] = {}
    for step in inspect_store(directory).steps:
        if step.published:
            assert step.valid, step
            place = directory / f"step-{step.step:08d}"
            paths = [place / "manifest.json", *(place / str(step.attempt)).iterdir()]
            found |= {str(path.relative_to(directory)): path.read_bytes() for path in paths}
    return found


def exchange_of(base: Path, rank: int, *, timeout_s: float) -> StoreExchange:
    store = FileStore(str(base), 2)
    return StoreExchange(store, rank=rank, world_size=2, timeout_s=timeout_s, prefix="test")


def test_a_stopped_rank_of_a_dead_attempt_writes_into_nothing_that_counts(
    tmp_path: Path,
    directory: Path,
    fork: Callable[..., Process],
    make_state: Any,
    same_tensors: Any,
) -> None:
    """Its coordinator was killed, as a launcher does; the rank itself was missed."""
    by_store(directory, make_state(1), 1)

    def work(rank: int) -> Callable[[], object]:
        def run() -> str:
            exchange = exchange_of(tmp_path / "ranks", rank, timeout_s=2)
            if rank == 1:
                signal_at("checkpoint/shard/write", "before", signal.SIGSTOP)
            store = CheckpointStore(directory, exchange=exchange)
            return store.save(make_state(2, rank), step=2).attempt

        return run

    coordinator, zombie = fork(work(0)), fork(work(1))
    zombie.wait_until_stopped()
    coordinator.send(signal.SIGKILL)
    assert coordinator.result() == -signal.SIGKILL
    successor = CheckpointStore(directory)
    assert successor.restore(make_state(0)) is not None
    successor.save(make_state(3), step=2)
    before = published_files(directory)
    zombie.send(signal.SIGCONT)
    error = zombie.result()
    assert isinstance(error, SaveError)
    assert published_files(directory) == before
    state = make_state(0)
    CheckpointStore(directory).restore(state)
    assert same_tensors(state, make_state(3))


@pytest.mark.parametrize(
    ("event", "edge"),
    [("gather", "after"), ("manifest/write", "after"), ("manifest/link", "before")],
)
def test_when_the_coordinator_dies_between_the_last_shard_and_the_manifest_nothing_is_published(
    tmp_path: Path,
    directory: Path,
    fork: Callable[..., Process],
    make_state: Any,
    same_tensors: Any,
    event: str,
    edge: str,
) -> None:
    by_store(directory, make_state(1), 1)

    def work(rank: int) -> Callable[[], object]:
        def run() -> str:
            exchange = exchange_of(tmp_path / "ranks", rank, timeout_s=2)
            if rank == 0:
                signal_at(f"checkpoint/{event}", edge, signal.SIGKILL)
            store = CheckpointStore(directory, exchange=exchange)
            return store.save(make_state(2, rank), step=2).attempt

        return run

    coordinator, survivor = fork(work(0)), fork(work(1))
    assert coordinator.result() == -signal.SIGKILL
    error = survivor.result()
    assert isinstance(error, SaveError)
    assert "rank 1 heard nothing" in str(error)
    assert "coordinator, rank 0" in str(error)
    report = inspect_store(directory)
    assert [(step.step, step.published) for step in report.steps] == [(1, True), (2, False)]
    # Every shard is there and whole, and is not resumed from.
    assert len(list(directory.glob("step-00000002/attempt-*/*.safetensors"))) == 2
    state = make_state(0)
    restored = CheckpointStore(directory).restore(state)
    assert restored is not None
    assert restored.collected == ("step-00000002",)
    assert same_tensors(state, make_state(1))
    by_store(directory, make_state(2), 2)
    assert inspect_store(directory).latest_valid == 2


@pytest.mark.parametrize("savers", [(by_dcp, by_dcp), (by_store, by_dcp)])
def test_of_two_coordinators_that_publish_the_same_step_exactly_one_wins(
    tmp_path: Path,
    directory: Path,
    fork: Callable[..., Process],
    make_state: Any,
    same_tensors: Any,
    savers: tuple[Save, Save],
) -> None:
    """Through DCP; two stores are in `test_store_ranks`."""

    def work(number: int) -> Callable[[], object]:
        def run() -> object:
            meet_at_link(tmp_path, parties=2)
            return savers[number](directory, make_state(number + 1), 7)

        return run

    results = [process.result() for process in [fork(work(0)), fork(work(1))]]
    winners = [number for number in (0, 1) if isinstance(results[number], str)]
    assert len(winners) == 1, results
    assert isinstance(results[1 - winners[0]], AlreadyPublishedError)
    state = make_state(0)
    restored = CheckpointStore(directory).restore(state)
    assert restored is not None
    assert same_tensors(state, make_state(winners[0] + 1))
    assert inspect_store(directory).leftovers == ()


def meet_at_link(base: Path, *, parties: int) -> None:
    """Wait before linking a manifest until ``parties`` processes are about to."""

    def listener(event: str, edge: str, facts: dict[str, object]) -> None:
        if (event, edge) == ("checkpoint/manifest/link", "before"):
            stop()
            (base / f"here-{os.getpid()}").touch()
            while len(list(base.glob("here-*"))) < parties:
                time.sleep(0.001)

    stop = listen(listener)


def test_of_two_jobs_that_share_a_store_one_wins_on_all_its_ranks_and_the_other_hears_of_it(
    tmp_path: Path,
    directory: Path,
    fork: Callable[..., Process],
    make_state: Any,
    same_tensors: Any,
) -> None:
    def work(job: int, rank: int) -> Callable[[], object]:
        def run() -> str:
            exchange = exchange_of(tmp_path / f"ranks-{job}", rank, timeout_s=60)
            meet_at_link(tmp_path, parties=2)
            store = CheckpointStore(directory, exchange=exchange)
            return store.save(make_state(job + 1, rank), step=5).attempt

        return run

    processes = {(job, rank): fork(work(job, rank)) for job in (0, 1) for rank in (0, 1)}
    results = {key: process.result() for key, process in processes.items()}
    (winner,) = [job for job in (0, 1) if isinstance(results[job, 0], str)]
    report = inspect_store(directory)
    assert report.steps[0].attempt == results[winner, 0] == results[winner, 1]
    for rank in (0, 1):
        assert isinstance(results[1 - winner, rank], AlreadyPublishedError)
        assert "lost the race" in str(results[1 - winner, rank])
    state = make_state(0)
    CheckpointStore(directory).restore(state)
    assert same_tensors(state, make_state(winner + 1))


def test_two_jobs_that_go_on_in_one_store_never_tear_a_checkpoint(
    tmp_path: Path, directory: Path, fork: Callable[..., Process], make_state: Any
) -> None:
    """Each collects what looks like leftovers to it, so saves fail; none that succeeded is lost."""
    steps = range(1, 16)

    def work(job: int) -> Callable[[], object]:
        def run() -> dict[int, object]:
            store = CheckpointStore(directory, keep_last=len(steps))
            saved: dict[int, object] = {}
            for step in steps:
                try:
                    saved[step] = store.save(make_state(job * 100 + step), step=step).attempt
                except SaveError as error:
                    saved[step] = error
            return saved

        return run

    results = [process.result() for process in [fork(work(0)), fork(work(1))]]
    report = {step.step: step for step in inspect_store(directory).steps}
    for step in steps:
        won = [saved[step] for saved in results if isinstance(saved[step], str)]
        assert len(won) <= 1
        if won:
            assert report[step].valid
            assert report[step].attempt == won[0]
    assert all(step.valid for step in report.values() if step.published)
    assert any(step.valid for step in report.values())


@pytest.mark.parametrize("place", ["directory", "memory", "moto"], indirect=True)
def test_what_is_published_after_it_was_listed_as_a_leftover_is_not_deleted(
    place: Any, make_state: Any
) -> None:
    """A new job has listed leftovers when the coordinator that was taken for dead publishes."""
    store = place.store()
    store.save(make_state(1), step=1)
    leftovers: list[str] = []

    def look(event: str, edge: str, _: dict[str, object]) -> None:
        if (event, edge) == ("checkpoint/manifest/link", "before"):
            leftovers.extend(store._directory.storage.leftovers())

    stop = listen(look)
    place.store().save(make_state(2), step=2)
    stop()
    assert any(name.startswith("step-00000002") for name in leftovers)
    assert store._directory.storage.delete(leftovers, []) == []
    assert [info.step for info in store.list()] == [1, 2]
    assert place.inspect().latest_valid == 2
