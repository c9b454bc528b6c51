"""Every test here begins with the same random streams, and leaves them as it found them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from seatrial.recovery.rng import capture_rng, restore_rng, seed_everything


@pytest.fixture(autouse=True)
def _streams_as_before() -> Iterator[None]:
    before = capture_rng()
    seed_everything(0, 0)
    yield
    restore_rng(before, fallback_seed=0)
