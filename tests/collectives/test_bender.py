"""What stands in for calls leaves its evidence before the effect, which may end the rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import Work

from seatrial.chaos.collectives.bender import Bender
from seatrial.chaos.fault import Fault
from seatrial.chaos.schedule import Schedule
from seatrial.chaos.trace import TraceWriter, read_trace

GROUP = SimpleNamespace(label="default_pg")
REORDER = "reorder rank=0 at=step:1/collective/all_reduce"


class Calls:
    """Calls of one group; ``made`` are those that were, with how many bends were recorded then."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace
        self.made: list[tuple[str, int]] = []
        self.fails = ""
        self._operation = SimpleNamespace(name="all_reduce")

    def __call__(self, site: str) -> Any:
        def issue() -> Work:
            bent = [each for each in read_trace(self._trace) if each["kind"] == "bent"]
            self.made.append((site, len(bent)))
            if site == self.fails:
                raise SystemExit
            return Work()

        return SimpleNamespace(group=GROUP, operation=self._operation, site=site, issue=issue)


def fault() -> Fault:
    (only,) = Schedule.parse(REORDER).faults
    return only


@pytest.fixture
def calls(tmp_path: Path) -> Calls:
    return Calls(tmp_path / "trace.jsonl")


@pytest.fixture
def bender(tmp_path: Path) -> Bender:
    observer: Any = SimpleNamespace(groups=[GROUP])
    return Bender(observer, TraceWriter(tmp_path / "trace.jsonl"), seed=0)


def test_a_swap_is_recorded_before_the_other_call_is_made(bender: Bender, calls: Calls) -> None:
    bender.arm(0, fault())
    bender(calls("first"))
    assert calls.made == []
    bender(calls("second"))
    assert calls.made == [("second", 1), ("first", 1)]
    bender(calls("third"))
    assert calls.made[2:] == [("third", 1)]


def test_so_it_is_known_if_the_rank_ends_of_it(
    bender: Bender, calls: Calls, tmp_path: Path
) -> None:
    bender.arm(0, fault())
    bender(calls("first"))
    calls.fails = "second"
    with pytest.raises(SystemExit):
        bender(calls("second"))
    (record,) = read_trace(tmp_path / "trace.jsonl")
    assert record["what"] == "was made after the next one, all_reduce at second"
