"""Verifies that a fault which waits for the restore of a job that restores by its own code strikes
where something can be restored: such a job is asked for its checkpoint in every attempt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from evidence import KILLED, Evidence, finish, uninterrupted

from seatrial.chaos.launch.context import RankContext
from seatrial.chaos.trace import TraceWriter
from seatrial.chaos.verdict import Verdict
from seatrial.plugins.jobs.own_checkpoints import OwnCheckpoints
from seatrial.recovery.collectives.observer import Observer
from seatrial.recovery.probe import listen
from seatrial.recovery.state import TrainingState

LATER = "kill rank=0 at=restore"


class _Job:
    def save_checkpoint(self, context: RankContext, state: TrainingState) -> None: ...

    def load_checkpoint(self, context: RankContext, state: TrainingState) -> bool:
        return False


@pytest.mark.parametrize(("attempt", "events"), [(1, []), (2, ["restore", "restore"])])
def test_it_is_no_restore_before_anything_can_have_been_saved(
    tmp_path: Path, attempt: int, events: list[str]
) -> None:
    trace = TraceWriter(tmp_path / "trace")
    context = RankContext(
        rank=0,
        world_size=1,
        local_rank=0,
        node=0,
        attempt=attempt,
        seed=0,
        topology="dp1",
        device=torch.device("cpu"),
        store=str(tmp_path),
        directory=tmp_path,
        timeout_s=1.0,
        trace=trace,
        observer=Observer(None),
    )
    announced: list[str] = []
    stop = listen(lambda event, edge, facts: announced.append(event))
    try:
        checkpoints = OwnCheckpoints(_Job(), context, {})
        assert checkpoints.restore(TrainingState(model=torch.nn.Linear(1, 1))) is None
    finally:
        stop()
        trace.close()
    assert announced == events


def test_one_that_struck_when_nothing_had_been_saved_is_not_exercised(tmp_path: Path) -> None:
    kill = "kill rank=1 at=step:1/data"
    run = Evidence(tmp_path / "run")
    run.strike(kill, step=1)
    run.strike(LATER, rank=0, fault=1, attempt=2, step=None, event="restore")
    run.attempt([], ending="failed", exits=KILLED)
    run.attempt([], ending="failed", exits={0: -9, 1: 1}, silent=(0, 1))
    finish(run, steps=range(1, 7), restored=None, source=None, published=(2, 4, 6))
    run.attempts = [replace(each, store=replace(each.store, own=True)) for each in run.attempts]
    judgement = run.judged(uninterrupted(tmp_path / "reference"), f"{kill}; {LATER}")
    assert judgement.verdict is Verdict.NOT_EXERCISED
    assert "nothing had been saved that could be restored" in judgement.reason
