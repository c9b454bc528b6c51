"""What may have had another cause proves nothing of a fault: never a pass by accident.

Each run here is one that recovered, with a fault whose bytes somebody read, and something else that
explains all that is seen. Does not: run a job; see `test_trials.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from disk_evidence import FILE, KILL, KILLED, DiskEvidence
from evidence import Evidence

from seatrial.chaos.verdict import Verdict

MISREAD = "corrupt rank=1 at=storage/read attempt=2"
FAILED: dict[str, Any] = {"ending": "failed", "exits": {0: 1, 1: 1}, "cause": "failed"}


@pytest.fixture
def reference(tmp_path: Path) -> Evidence:
    clean = Evidence(tmp_path / "reference")
    clean.attempt(range(1, 7), published=(2, 4, 6), valid=(4, 6))
    return clean


@pytest.fixture
def run(tmp_path: Path) -> DiskEvidence:
    return DiskEvidence(tmp_path / "run")


def killed(run: DiskEvidence, *, own: bool = True, **different: Any) -> None:
    """Attempt 1: killed in step 5."""
    normal: dict[str, Any] = {"ending": "failed", "exits": KILLED, "cause": "x"}
    run.attempt(range(1, 5), **normal | {"published": (2, 4), "valid": (2, 4)} | different)
    if own:
        run.is_the_jobs()


def misread(run: DiskEvidence) -> None:
    """Rank 1 is given a wrong bit when it restores in attempt 2."""
    run.strike(MISREAD, fault=1, attempt=2, step=None, event="storage/read", t=16.0)
    facts = {"fault": 1, "event": "storage/read", "file": FILE, "change": "bit 0 flipped"}
    run.saw(1, 2, "operation", t=16.0, **facts, changed=True)
    run.saw(1, 2, "met", t=16.0, fault=1, file=FILE, step=4)


@pytest.mark.parametrize(("own", "begins"), [(False, False), (True, True)])
def test_an_error_long_after_the_reading_is_not_of_it(
    reference: Evidence, run: DiskEvidence, own: bool, begins: bool
) -> None:
    """This project's store says what it does not accept; and who began had accepted it."""
    run.strike(KILL, fault=0)
    killed(run, own=own)
    misread(run)
    run.attempt((), restored=4, source=1, silent=() if begins else (0, 1), valid=(2, 4), **FAILED)
    run.fail(rank=1, attempt=2, error="RuntimeError", t=19.5, message="address already in use")
    if own:
        run.is_the_jobs()
    run.attempt(range(5, 7), restored=4, source=1, published=(6,), valid=(4, 6))
    judgement = run.judged(reference, f"{KILL}; {MISREAD}")
    assert judgement.verdict is not Verdict.RECOVERED, judgement.reason
