"""Messages reach the right round, missing ranks are named, and the store does not grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from seatrial.recovery import exchange as module
from seatrial.recovery.errors import CheckpointError
from seatrial.recovery.exchange import Exchange, SoloExchange, StoreExchange


def test_the_coordinator_collects_in_rank_order_and_all_hear_the_announcement(
    run_threads: Callable[..., list[Any]],
) -> None:
    def work(rank: int, exchange: Exchange) -> object:
        round_ = exchange.open_round("save")
        parts = round_.gather("part", b"%d" % rank)
        if exchange.is_coordinator:
            assert parts is not None
            round_.announce("all", b",".join(parts))
        return round_.receive("all")

    assert run_threads(3, work) == [b"0,1,2"] * 3


def test_alone_the_same_calls_work() -> None:
    round_ = SoloExchange().open_round("save")
    assert round_.gather("part", b"x") == [b"x"]
    round_.announce("all", b"y")
    assert round_.receive("all") == b"y"


def test_a_message_longer_than_a_store_takes_at_once_arrives_whole(
    run_threads: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PART_BYTES", 4)

    def work(rank: int, exchange: Exchange) -> object:
        received = []
        for length in (0, 4, 5, 8, 9, 30):
            round_ = exchange.open_round("save")
            parts = round_.gather("part", bytes(range(rank, rank + length)))
            if exchange.is_coordinator:
                assert parts is not None
                round_.announce("all", b"".join(parts))
            received.append(round_.receive("all"))
        return received

    expected = [bytes([*range(n), *range(1, n + 1)]) for n in (0, 4, 5, 8, 9, 30)]
    assert run_threads(2, work) == [expected] * 2


def test_ranks_that_do_not_report_are_named(run_threads: Callable[..., list[Any]]) -> None:
    def work(rank: int, exchange: Exchange) -> None:
        round_ = exchange.open_round("save")
        if rank in (0, 2):
            round_.gather("part", b"")

    results = run_threads(4, work, timeout_s=0.05)
    assert isinstance(results[0], CheckpointError)
    assert "rank 1, 3 did not report" in str(results[0])


def test_a_silent_coordinator_is_named(run_threads: Callable[..., list[Any]]) -> None:
    def work(rank: int, exchange: Exchange) -> None:
        if rank == 1:
            exchange.open_round("save").receive("all")

    assert "from the coordinator, rank 0" in str(run_threads(2, work, timeout_s=0.05)[1])


def test_a_late_message_of_one_round_is_not_taken_for_the_next(
    run_threads: Callable[..., list[Any]],
) -> None:
    def work(rank: int, exchange: Exchange) -> object:
        first = exchange.open_round("save")
        if rank == 1:
            first.post("part", b"late")
        second = exchange.open_round("save")
        return second.gather("part", b"new")

    assert run_threads(2, work)[0] == [b"new", b"new"]


def test_the_store_does_not_grow() -> None:
    store = HashStore()
    zero, one = (
        StoreExchange(store, rank=rank, world_size=2, timeout_s=5, prefix="p") for rank in (0, 1)
    )
    sizes = []
    for _ in range(10):
        mine, other = zero.open_round("save"), one.open_round("save")
        other.post("part", b"")
        mine.gather("part", b"")
        mine.announce("all", b"")
        other.receive("all")
        sizes.append(store.num_keys())
    assert set(sizes) == {sizes[0]}
