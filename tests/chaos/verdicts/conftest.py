"""The runs that verdicts are asked of: six steps, a checkpoint every two, and a kill in step 5."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from evidence import KILL, KILLED, Evidence, uninterrupted

MakeEvidence = Callable[[str], Evidence]


@pytest.fixture
def make_evidence(tmp_path: Path) -> MakeEvidence:
    return lambda name: Evidence(tmp_path / name)


@pytest.fixture
def reference(tmp_path: Path) -> Evidence:
    return uninterrupted(tmp_path / "reference")


@pytest.fixture
def killed(make_evidence: MakeEvidence) -> Evidence:
    """A run whose first attempt was killed in step 5, after the checkpoint of step 4."""
    run = make_evidence("run")
    run.strike(KILL)
    run.attempt(
        range(1, 5), ending="failed", exits=KILLED, published=(2, 4), valid=(2, 4), cause="killed"
    )
    return run


@pytest.fixture
def flipped(make_evidence: MakeEvidence) -> Evidence:
    """A run in which the checkpoint of step 4 was damaged before the kill."""
    run = make_evidence("run")
    run.strike("flip", fault=0)
    run.strike("kill", fault=1)
    run.attempt(
        range(1, 5),
        ending="failed",
        exits=KILLED,
        published=(2, 4),
        valid=(2,),
        damaged={4: "digest"},
        damage=(4,),
    )
    return run
