"""The runs that verdicts are asked of: six steps, a checkpoint every two, and a kill in step 5."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from evidence import KILL, Evidence, interrupt

MakeEvidence = Callable[[str], Evidence]


@pytest.fixture
def make_evidence(tmp_path: Path) -> MakeEvidence:
    return lambda name: Evidence(tmp_path / name)


@pytest.fixture
def killed(run: Evidence) -> Evidence:
    """A run whose first attempt was killed in step 5, after the checkpoint of step 4."""
    run.strike(KILL)
    interrupt(run, cause="killed")
    return run


@pytest.fixture
def flipping(run: Evidence) -> Evidence:
    """A run in which a flip struck, and then a kill; what came of it is to be added."""
    run.strike("flip", fault=0)
    run.strike("kill", fault=1)
    return run


@pytest.fixture
def flipped(flipping: Evidence) -> Evidence:
    """A run in which the checkpoint of step 4 was damaged before the kill."""
    interrupt(flipping, valid=(2,), damaged={4: "digest"}, damage=(4,))
    return flipping
