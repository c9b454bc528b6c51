"""What refuses a save: on all ranks alike, before anything is written, and by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from seatrial.recovery.errors import RecoveryError, ReplicaMismatchError, SaveError
from seatrial.recovery.exchange import Exchange
from seatrial.recovery.fingerprint import Fingerprinter
from seatrial.recovery.replicas import Replicas
from seatrial.recovery.store import CheckpointStore

from .conftest import PlainState

RunThreads = Callable[..., list[Any]]
Guards = Callable[[int], list[Replicas]]


class Objects:
    """Refuses what it is told to."""

    name = "objects"

    def __init__(self, refuses: bool = True, fails_on: int | None = None) -> None:
        self._refuses, self._fails_on = refuses, fails_on
        self.asked: list[object] = []

    def testify(self, state: Any) -> Any:
        if self._fails_on is not None and state.own["rank"] == self._fails_on:
            raise ValueError("no idea")
        return state.own["rank"]

    def judge(self, testimonies: Sequence[Any]) -> Any:
        self.asked += testimonies
        return "no good" if self._refuses else ""

    def conclude(self, answer: Any) -> None:
        if answer:
            raise RecoveryError(answer)


def state(rank: int, **tensors: torch.Tensor) -> PlainState:
    live: dict[str, torch.Tensor] = {"model/w": torch.nn.Parameter(torch.arange(4.0))}
    return PlainState(live=live | tensors, own={"rank": rank})


def saved(
    run_threads: RunThreads, directory: Path, states: Sequence[PlainState], guards: Any
) -> list[Any]:
    def save(rank: int, exchange: Exchange) -> int:
        store = CheckpointStore(directory, exchange=exchange, guards=guards(rank))
        return store.save(states[rank], step=5).step

    return run_threads(len(states), save)


def test_a_guard_that_objects_refuses_the_save_on_all_ranks(
    run_threads: RunThreads, tmp_path: Path
) -> None:
    results = saved(run_threads, tmp_path, [state(0), state(1)], lambda rank: [Objects()])
    assert [type(each) for each in results] == [SaveError, SaveError]
    assert {str(each) for each in results} == {"step 5 was not saved: no good"}
    assert not list(tmp_path.rglob("*.safetensors"))


def test_every_rank_is_asked(run_threads: RunThreads, tmp_path: Path) -> None:
    guards = {rank: Objects(refuses=False) for rank in range(3)}
    states = [state(rank) for rank in range(3)]
    assert saved(run_threads, tmp_path, states, lambda rank: [guards[rank]]) == [5, 5, 5]
    assert guards[0].asked == [0, 1, 2]


def test_a_guard_that_fails_on_one_rank_fails_the_save_on_all(
    run_threads: RunThreads, tmp_path: Path
) -> None:
    states = [state(0), state(1)]
    results = saved(run_threads, tmp_path, states, lambda rank: [Objects(False, fails_on=1)])
    assert all(isinstance(each, SaveError) for each in results)
    assert all("rank 1: ValueError: no idea" in str(each) for each in results)


def test_ranks_with_other_guards_are_told(run_threads: RunThreads, tmp_path: Path) -> None:
    states = [state(0), state(1)]
    results = saved(run_threads, tmp_path, states, lambda rank: [Objects(False)] * (rank + 1))
    assert all("different guards" in str(each) for each in results)


def test_a_guard_is_asked_before_a_background_save(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, guards=[Objects()])
    with pytest.raises(SaveError, match="step 5 was not saved: no good"):
        store.save_async(state(0), step=5)


def replicas(rank: int) -> list[Replicas]:
    return [Replicas(rank=rank)]


def sharing(rank: int) -> list[Replicas]:
    """With a fingerprinter that has served for the whole state."""
    fingerprinter = Fingerprinter(rank=rank)
    fingerprinter(state(rank))
    return [Replicas(rank=rank, fingerprinter=fingerprinter)]


either_way = pytest.mark.parametrize("guards", [replicas, sharing])


def flipped(rank: int, name: str = "model/w") -> PlainState:
    one = state(rank)
    changed = one.live[name].detach().clone()
    changed.view(torch.int32)[2] ^= 1
    one.live[name] = torch.nn.Parameter(changed)
    return one


def test_equal_copies_are_saved(run_threads: RunThreads, tmp_path: Path) -> None:
    assert saved(run_threads, tmp_path, [state(r) for r in range(3)], replicas) == [5, 5, 5]


@either_way
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_one_flipped_bit_is_refused_and_its_rank_named(
    run_threads: RunThreads, tmp_path: Path, odd: int, guards: Guards
) -> None:
    states = [flipped(rank) if rank == odd else state(rank) for rank in range(3)]
    results = saved(run_threads, tmp_path, states, guards)
    assert [type(each) for each in results] == [ReplicaMismatchError] * 3
    assert str(results[0]) == (
        f"step 5 was not saved: the copies of model/w on rank {odd} differ from those of the other "
        "ranks"
    )
    assert CheckpointStore(tmp_path).latest() is None


def test_of_two_copies_that_differ_both_are_named(run_threads: RunThreads, tmp_path: Path) -> None:
    results = saved(run_threads, tmp_path, [state(0), flipped(1)], replicas)
    assert "on ranks 0, 1 differ, and there is no majority" in str(results[0])


def test_the_optimizer_s_state_is_compared(run_threads: RunThreads, tmp_path: Path) -> None:
    states = [state(rank, **{"optimizer/w/exp_avg": torch.ones(2) + rank}) for rank in range(2)]
    assert "optimizer/w/exp_avg" in str(saved(run_threads, tmp_path, states, replicas)[0])


@either_way
def test_buffers_may_differ(run_threads: RunThreads, tmp_path: Path, guards: Guards) -> None:
    states = [state(rank, **{"model/mean": torch.ones(2) + rank}) for rank in range(2)]
    assert saved(run_threads, tmp_path, states, guards) == [5, 5]


def test_a_tensor_that_one_rank_alone_holds_has_no_copies(
    run_threads: RunThreads, tmp_path: Path
) -> None:
    states = [
        state(0, **{"optimizer/a": torch.ones(2)}),
        state(1, **{"optimizer/b": torch.ones(3)}),
    ]
    assert saved(run_threads, tmp_path, states, replicas) == [5, 5]


def test_a_save_goes_on_after_one_that_was_refused(run_threads: RunThreads, tmp_path: Path) -> None:
    def work(rank: int, exchange: Exchange) -> object:
        store = CheckpointStore(tmp_path, exchange=exchange, guards=[Replicas(rank=rank)])
        with pytest.raises(ReplicaMismatchError):
            store.save(flipped(rank) if rank else state(rank), step=1)
        return [store.save(state(rank), step=step).step for step in (2, 3)]

    assert run_threads(2, work) == [[2, 3], [2, 3]]


def test_a_layout_that_the_coordinator_never_saw_is_told_again(
    run_threads: RunThreads, tmp_path: Path
) -> None:
    def work(rank: int, exchange: Exchange) -> object:
        broken = Objects(refuses=False, fails_on=1)
        guards = [Replicas(rank=rank), broken]
        store = CheckpointStore(tmp_path, exchange=exchange, guards=guards)
        with pytest.raises(SaveError, match="no idea"):
            store.save(state(rank), step=1)
        broken._fails_on = None
        return store.save(state(rank), step=2).step

    assert run_threads(2, work) == [2, 2]
