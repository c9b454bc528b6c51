"""Verifies that every RNG stream continues exactly after a restore and that ranks differ.

Does not verify CUDA streams; this project's tests run without a GPU.
"""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from seatrial.recovery.errors import StateError
from seatrial.recovery.plain import dumps, loads
from seatrial.recovery.rng import capture_rng, derive_seed, restore_rng, seed_everything


def draw(generators: dict[str, torch.Generator]) -> list[float]:
    named = [float(torch.rand((), generator=one)) for one in generators.values()]
    # gauss and normal keep a second value for the next call, which is state as well.
    numbers = [random.random(), random.gauss(0, 1), float(numpy.random.normal())]
    return [*numbers, float(torch.rand(())), float(torch.randn(())), *named]


def test_every_stream_continues_after_a_round_trip_through_plain_data() -> None:
    generators = {"augmentation": torch.Generator().manual_seed(3)}
    seed_everything(5, 0)
    draw(generators)
    saved = loads(dumps(capture_rng(generators=generators)))
    expected = [draw(generators) for _ in range(3)]

    seed_everything(6, 1, generators=generators)
    assert isinstance(saved, dict)
    assert restore_rng(saved, generators=generators, fallback_seed=0) == []

    assert [draw(generators) for _ in range(3)] == expected


def test_capturing_draws_nothing() -> None:
    assert dumps(capture_rng()) == dumps(capture_rng())


@pytest.mark.parametrize(("seed", "rank"), [(0, 1), (1, 0), (1, 1)])
def test_seeds_and_ranks_give_different_streams(seed: int, rank: int) -> None:
    generators = {"noise": torch.Generator()}
    seed_everything(0, 0, generators=generators)
    first = draw(generators)
    seed_everything(seed, rank, generators=generators)
    assert not set(first) & set(draw(generators))


def test_seeding_is_repeatable() -> None:
    seed_everything(4, 2)
    first = draw({})
    seed_everything(4, 2)
    assert draw({}) == first


def test_derived_seeds_differ_in_every_argument() -> None:
    seeds = {derive_seed(s, n, i) for s in range(5) for n in ("torch", "numpy") for i in range(5)}
    assert len(seeds) == 50
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_stream_without_saved_state_is_derived_and_named() -> None:
    saved = capture_rng()
    generators = {"late": torch.Generator()}
    assert restore_rng(saved, generators=generators, fallback_seed=9) == ["late"]
    first = torch.rand((), generator=generators["late"])
    restore_rng(saved, generators=generators, fallback_seed=9)
    assert torch.equal(torch.rand((), generator=generators["late"]), first)


def test_a_saved_stream_that_does_not_exist_here_is_refused() -> None:
    saved = capture_rng(generators={"mixing": torch.Generator()})
    with pytest.raises(StateError, match=r"do not exist here: mixing; this rank has python, numpy"):
        restore_rng(saved, fallback_seed=0)


@pytest.mark.parametrize("stream", ["python", "numpy", "torch"])
def test_a_malformed_stream_is_refused_by_name(stream: str) -> None:
    saved = capture_rng()
    saved[stream] = dict.fromkeys(saved[stream], b"short")
    with pytest.raises(StateError, match=f"stream '{stream}' is malformed"):
        restore_rng(saved, fallback_seed=0)
