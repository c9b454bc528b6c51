"""A background save holds what the state was at the call, one at a time, and hides no error."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seatrial.recovery import CheckpointStore, inspect_store
from seatrial.recovery.errors import AlreadyPublishedError, SaveError
from seatrial.recovery.exchange import Exchange
from seatrial.recovery.layout import local_parts
from seatrial.recovery.probe import listen
from seatrial.recovery.staging import Staging


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Background saves stop before they write, until it is set."""
    opened = threading.Event()

    def listener(event: str, edge: str, _facts: dict[str, object]) -> None:
        if (event, edge) == ("checkpoint/shard/write", "before") and in_background():
            assert opened.wait(60)

    stop = listen(listener)
    yield opened
    opened.set()
    stop()


def in_background() -> bool:
    return threading.current_thread().name == "seatrial-save"


def fail_in_background(event: str, error: Exception) -> None:
    """Raise ``error`` the first time that a background save announces ``event``."""

    def listener(name: str, _edge: str, _facts: dict[str, object]) -> None:
        if name == event and in_background():
            stop()
            raise error

    stop = listen(listener)


def test_what_the_state_was_at_the_call_comes_back_whatever_happens_to_it_afterwards(
    tmp_path: Path, make_state: Any, same_tensors: Any, gate: threading.Event
) -> None:
    store = CheckpointStore(tmp_path)
    state = make_state(1)
    handle = store.save_async(state, step=1)
    for tensor in state.live.values():
        tensor.zero_()
    state.shared["nested"].append("later")
    state.own["rng"].zero_()
    assert not handle.done()
    assert store.latest() is None
    gate.set()
    assert handle.wait().step == 1
    assert handle.done()
    assert store.latest() == 1
    restored = make_state(0)
    assert store.restore(restored)
    assert same_tensors(restored, make_state(1))
    shared, ranks, _ = restored.loaded
    assert shared == make_state(1).shared
    assert torch.equal(ranks[0]["rng"], torch.arange(3))


def test_strided_and_lazily_conjugated_tensors_are_copied_bitwise(
    tmp_path: Path, make_state: Any
) -> None:
    wide = torch.randn(6, 4, dtype=torch.complex64)
    state = make_state(1)
    state.live = {
        "turned": torch.randn(6, 4).t(),
        "conjugated": wide.conj(),
        "negated": wide.conj().imag,
        "tiny": torch.randn(6, 4).to(torch.float8_e5m2).t(),
        "scalar": torch.tensor(3.0),
        "nothing": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.randn(5)),
    }
    expected = {name: tensor.detach().clone() for name, tensor in state.live.items()}
    store = CheckpointStore(tmp_path)
    store.save_async(state, step=1).wait()
    state.live = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    store.restore(state)
    for name, tensor in expected.items():
        assert state.live[name].dtype is tensor.dtype
        assert torch.equal(state.live[name].to(torch.complex64), tensor.to(torch.complex64)), name


def test_the_next_save_waits_for_the_one_in_flight(
    tmp_path: Path, make_state: Any, gate: threading.Event
) -> None:
    store = CheckpointStore(tmp_path, keep_last=9)
    first = store.save_async(make_state(1), step=1)
    threading.Timer(0.05, gate.set).start()
    second = store.save_async(make_state(2), step=2)
    assert first.done()
    manifest = store.save(make_state(3), step=3)
    assert second.done()
    assert (second.wait().parent_step, manifest.parent_step) == (1, 2)
    assert [info.step for info in store.list()] == [1, 2, 3]


def test_a_restore_and_a_prune_wait_for_the_one_in_flight(
    tmp_path: Path, make_state: Any, same_tensors: Any, gate: threading.Event
) -> None:
    store = CheckpointStore(tmp_path)
    handle = store.save_async(make_state(1), step=1)
    threading.Timer(0.05, gate.set).start()
    state = make_state(0)
    assert store.restore(state)
    assert same_tensors(state, make_state(1))
    handle = store.save_async(make_state(2), step=2)
    assert store.prune() == []
    assert handle.done()


def test_the_staging_memory_is_used_again(make_state: Any) -> None:
    staging = Staging()
    first = staging.copy(local_parts(make_state(1).live))
    addresses = [part.tensor.data_ptr() for part in first]
    second = staging.copy(local_parts(make_state(2).live))
    assert [part.tensor.data_ptr() for part in second] == addresses
    assert all(torch.equal(p.tensor, make_state(2).live[p.region.name]) for p in second)
    staging.copy(local_parts({"one": torch.zeros(1)}))
    assert staging.size_bytes >= 4800


def test_random_numbers_and_threads_of_the_training_are_untouched(
    tmp_path: Path, make_state: Any
) -> None:
    def draws() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    def seed() -> None:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)

    seed()
    expected, threads = draws(), torch.get_num_threads()
    state = make_state(1)
    seed()
    CheckpointStore(tmp_path).save_async(state, step=1).wait()
    assert draws() == expected
    assert torch.get_num_threads() == threads


# Errors


def test_an_error_is_logged_and_raised_by_wait_and_then_by_no_other_call(
    tmp_path: Path, make_state: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path)
    fail_in_background("checkpoint/shard/fsync", OSError(28, "No space left on device"))
    handle = store.save_async(make_state(1), step=1)
    with pytest.raises(SaveError, match=r"step 1 was not saved: rank 0: .*No space left"):
        handle.wait()
    assert "step 1 failed" in caplog.text
    assert store.latest() is None
    store.save(make_state(1), step=1)


@pytest.mark.parametrize("call", ["save", "save_async", "restore", "prune"])
def test_an_error_that_nobody_waited_for_is_raised_once_by_the_next_call(
    tmp_path: Path, make_state: Any, call: str
) -> None:
    calls: dict[str, Callable[[CheckpointStore], object]] = {
        "save": lambda store: store.save(make_state(2), step=2),
        "save_async": lambda store: store.save_async(make_state(2), step=2).wait(),
        "restore": lambda store: store.restore(make_state(2)),
        "prune": lambda store: store.prune(),
    }
    store = CheckpointStore(tmp_path)
    fail_in_background("checkpoint/report", OSError(5, "Input/output error"))
    store.save_async(make_state(1), step=1)
    with pytest.raises(SaveError, match=r"step 1 was not saved: .*Input/output error"):
        calls[call](store)
    calls[call](store)


def test_a_step_that_is_published_is_refused_in_the_call(tmp_path: Path, make_state: Any) -> None:
    store = CheckpointStore(tmp_path)
    store.save_async(make_state(1), step=1).wait()
    with pytest.raises(AlreadyPublishedError):
        store.save_async(make_state(1), step=1)
    with pytest.raises(ValueError, match="step is -1"):
        store.save_async(make_state(1), step=-1)
    assert store.save_async(make_state(1), step=2).wait().parent_step == 1


def test_a_wait_with_a_limit_says_that_the_save_goes_on(
    tmp_path: Path, make_state: Any, gate: threading.Event
) -> None:
    handle = CheckpointStore(tmp_path).save_async(make_state(1), step=1)
    with pytest.raises(TimeoutError, match="step 1 is not over"):
        handle.wait(timeout_s=0.001)
    gate.set()
    assert handle.wait().step == 1


def test_a_rank_that_cannot_copy_fails_the_save_of_all(
    tmp_path: Path, make_state: Any, run_threads: Callable[..., list[Any]]
) -> None:
    class Full(Staging):
        def copy(self, parts: Any) -> Any:
            raise MemoryError("no memory for the copy")

    def work(rank: int, exchange: Exchange) -> None:
        store = CheckpointStore(tmp_path, exchange=exchange)
        if rank == 1:
            store._staging = Full()
        store.save_async(make_state(1), step=1).wait()

    for error in run_threads(2, work):
        assert isinstance(error, SaveError)
        assert "rank 1: MemoryError: no memory for the copy" in str(error)


# Several ranks, and processes that end


def test_rounds_in_the_foreground_are_not_confused_with_those_of_the_save(
    tmp_path: Path, make_state: Any, run_threads: Callable[..., list[Any]]
) -> None:
    """Rank 1 has not reported, but posted in the foreground, under the same names."""
    posted, talked = threading.Event(), threading.Event()

    def slow(event: str, edge: str, facts: dict[str, object]) -> None:
        if (event, edge) == ("checkpoint/gather", "before"):
            assert in_background()
            assert posted.wait(60)
        if (event, edge) == ("checkpoint/shard/write", "before"):
            assert "rank-00001" not in str(facts["file"]) or talked.wait(60)

    def work(rank: int, exchange: Exchange) -> object:
        store = CheckpointStore(tmp_path, exchange=exchange)
        handle = store.save_async(make_state(1, rank), step=1)
        heard = []
        for number in range(5):
            round_ = exchange.open_round("save")
            round_.post("report", b"%d" % (rank + number))
            if rank == 1:
                posted.set()
            elif number == 0:
                # Long enough to take the other message, if it could be taken for the report.
                with pytest.raises(TimeoutError):
                    handle.wait(timeout_s=0.2)
            if rank == 0:
                round_.announce("commit", b",".join(round_.collect("report")))
            heard.append(round_.receive("commit"))
        if rank == 0:
            talked.set()
        return heard, handle.wait().step

    stop = listen(slow)
    results = run_threads(2, work)
    stop()
    assert results == [([b"%d,%d" % (n, n + 1) for n in range(5)], 1)] * 2
    assert inspect_store(tmp_path).latest_valid == 1


def test_a_kill_at_any_event_of_a_background_save_leaves_the_old_or_the_new(
    tmp_path: Path, make_state: Any, same_tensors: Any, fork_ranks: Callable[..., list[Any]]
) -> None:
    published = set()
    # Ends by itself: with the first run in which nothing was left to kill.
    for nth in range(1, 1000):
        directory = tmp_path / f"store-{nth}"

        def work(rank: int, exchange: Exchange, nth: int = nth, directory: Path = directory) -> Any:
            store = CheckpointStore(directory, exchange=exchange)
            store.save(make_state(1, rank), step=1)
            if rank == 0:
                kill_at_nth(nth)
            handle = store.save_async(make_state(2, rank), step=2)
            return handle.wait().step

        results = fork_ranks(2, work)
        latest = inspect_store(directory).latest_valid
        assert latest in (1, 2)
        published.add(latest)
        state = make_state(0)
        CheckpointStore(directory).restore(state)
        assert same_tensors(state, make_state(latest))
        if results == [2, 2]:
            break
        assert results[0] == -signal.SIGKILL
    assert nth > 20
    assert published == {1, 2}


def kill_at_nth(nth: int) -> None:
    left = nth

    def listener(_event: str, _edge: str, _facts: dict[str, object]) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    listen(listener)


def test_a_process_that_ends_normally_finishes_its_save(tmp_path: Path) -> None:
    program = """
import sys, torch
from seatrial.recovery import CheckpointStore, TrainingState
model = torch.nn.Linear(4000, 1000)
CheckpointStore(sys.argv[1]).save_async(TrainingState(model=model), step=3)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=120)
    assert inspect_store(tmp_path).latest_valid == 3
