"""Verifies that samples come exactly once an epoch on any topology and across a restore."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seatrial.recovery.errors import StateError
from seatrial.recovery.sampler import ShuffleSampler, rank_share


def make(num_samples: int = 20, batch_size: int = 8, seed: int = 1) -> ShuffleSampler:
    return ShuffleSampler(num_samples=num_samples, batch_size=batch_size, seed=seed)


def take(sampler: ShuffleSampler, count: int) -> list[tuple[int, list[int]]]:
    batches = [sampler.next_batch() for _ in range(count)]
    return [(epoch, indices.tolist()) for epoch, indices in batches]


@given(st.integers(1, 40), st.integers(1, 12))
def test_an_epoch_gives_every_sample_once_with_a_partial_tail(samples: int, batch: int) -> None:
    per_epoch = -(-samples // batch)
    batches = take(make(samples, batch), per_epoch)
    assert sorted(i for _, indices in batches for i in indices) == list(range(samples))
    assert {epoch for epoch, _ in batches} == {0}
    assert [len(indices) for _, indices in batches[:-1]] == [batch] * (per_epoch - 1)


def test_the_next_epoch_has_another_order() -> None:
    batches = take(make(20, 20), 2)
    assert [epoch for epoch, _ in batches] == [0, 1]
    assert batches[0][1] != batches[1][1]


def test_another_seed_gives_another_order() -> None:
    assert take(make(seed=1), 1) != take(make(seed=2), 1)


@pytest.mark.parametrize("before", range(8))
def test_a_restored_sampler_continues_where_it_was(before: int) -> None:
    sampler = make()
    take(sampler, before)
    state = sampler.state_dict()
    other = make(seed=99)
    other.load_state_dict(state)
    assert take(other, 6) == take(sampler, 6)


def test_looking_ahead_takes_nothing() -> None:
    sampler = make()
    take(sampler, 2)
    state = sampler.state_dict()
    upcoming = sampler.upcoming()
    seen = [(epoch, indices.tolist()) for epoch, indices in (next(upcoming) for _ in range(5))]
    assert sampler.state_dict() == state
    assert take(sampler, 5) == seen


def test_another_batch_size_continues_with_the_next_sample() -> None:
    sampler, other = make(), make(batch_size=3)
    order = [i for _, indices in take(make(batch_size=20), 1) for i in indices]
    take(sampler, 1)
    other.load_state_dict(sampler.state_dict())
    assert take(other, 1) == [(0, order[8:11])]


def test_asking_for_a_batch_draws_from_no_shared_rng() -> None:
    before = torch.get_rng_state()
    take(make(), 5)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_state_of_another_dataset_is_refused() -> None:
    with pytest.raises(StateError, match="counts 20 samples, but the dataset here has 21"):
        make(21).load_state_dict(make(20).state_dict())


@given(st.integers(0, 30), st.integers(1, 9))
def test_every_row_of_a_batch_has_exactly_one_rank(rows: int, ranks: int) -> None:
    batch = torch.arange(rows)
    shares = [rank_share(batch, rank=rank, world_size=ranks) for rank in range(ranks)]
    assert torch.equal(torch.cat(shares), batch)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 is not one of the 2 ranks"):
        rank_share(torch.arange(4), rank=2, world_size=2)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="num_samples=0"):
        make(0)
