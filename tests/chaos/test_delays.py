"""When a delay has shown its effect: its thread slept for so long, or its attempt failed meanwhile.

Evidence only, but for the record that a rank leaves behind; delays of operations of the storage are
in tests/storage_faults.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from evidence import Evidence, finish, interrupt

from seatrial.chaos.inject import Injector, Position
from seatrial.chaos.ledger import Ledger
from seatrial.chaos.schedule import Schedule
from seatrial.chaos.trace import TraceWriter, read_trace
from seatrial.chaos.verdict import Verdict

DELAY, KILL = "delay rank=0 at=step:5/data seconds={}", "kill rank=1 at=step:5/data"
COMPLETE: dict[str, Any] = {"published": (2, 4, 6), "valid": (4, 6)}


def test_the_record_of_the_whole_delay_is_its_effect_whatever_else_the_rank_did(
    reference: Evidence, run: Evidence
) -> None:
    run.strike("delay resume=3", rank=0)
    run.record(0, 1, "event", event="forward", edge="before", step=5, t=11.0)
    run.record(0, 1, "delayed", fault=0, seconds=3.0, t=13.0)
    run.attempt(range(1, 7), **COMPLETE)
    judgement = run.judged(reference, DELAY.format(3))
    assert judgement.verdict is Verdict.RECOVERED, judgement.reason


@pytest.mark.parametrize("seconds", [3, 30])
def test_silence_is_no_proof_of_a_delay(reference: Evidence, run: Evidence, seconds: int) -> None:
    # The rank says nothing more for the 4 s from the strike to the end of the attempt.
    run.strike(f"delay resume={seconds}", rank=0)
    run.attempt(range(1, 7), **COMPLETE)
    judgement = run.judged(reference, DELAY.format(seconds))
    assert judgement.verdict is Verdict.NOT_EXERCISED


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(30, Verdict.RECOVERED), (1, Verdict.NOT_EXERCISED)]
)
def test_a_delay_may_be_cut_short_by_the_end_of_its_attempt(
    reference: Evidence, run: Evidence, seconds: int, verdict: Verdict
) -> None:
    run.strike(f"delay resume={seconds}", rank=0)
    run.strike("kill", fault=1)
    interrupt(run, exits={1: -signal.SIGKILL})
    finish(run)
    judgement = run.judged(reference, f"{DELAY.format(seconds)}; {KILL}")
    assert judgement.verdict is verdict, judgement.reason


def test_a_rank_records_how_long_it_was_delayed(tmp_path: Path) -> None:
    (tmp_path / "strikes").mkdir()
    position = Position(
        rank=0, world_size=1, ranks_per_node=1, attempt=1, store=str(tmp_path), pids=tmp_path
    )
    injector = Injector(
        Schedule.parse("kill rank=0 at=exit; delay rank=0 at=data seconds=0.01"),
        position,
        Ledger(tmp_path / "strikes"),
        TraceWriter(tmp_path / "trace"),
    )
    injector("data", "before", {})
    last = read_trace(tmp_path / "trace")[-1]
    assert (last["kind"], last["fault"], last["seconds"]) == ("delayed", 1, 0.01)
