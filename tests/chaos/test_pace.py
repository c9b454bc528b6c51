"""The deadlines of hangs, from the pace of the reference."""

from __future__ import annotations

from pathlib import Path

from evidence import Evidence

from seatrial.chaos.reference import _longest_gaps_s


def test_the_pace_is_that_of_running_ranks_and_not_of_starting_ones(tmp_path: Path) -> None:
    evidence = Evidence(tmp_path)
    for rank, times in ((0, (1.0, 30.0, 33.0)), (1, (30.5, 30.6, 34.0))):
        for t in times:
            evidence.record(rank, 1, "event", t=t)
        evidence.record(rank, 1, "began", t=33.0)
    evidence.attempt((), silent=(0, 1))  # it ends at 14
    gaps_s = _longest_gaps_s(evidence.run)
    assert gaps_s["all_run"] == 33.0 - 30.6
    assert gaps_s["in_steps"] == 34.0 - 33.0
    assert gaps_s["leaving"] == 14.0 - 34.0
