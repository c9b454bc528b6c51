"""What a run that changes its topology on the way is judged by, leg for leg, from made-up evidence.

Two topologies of two ranks each: ``dp2``, lost after step 2, then ``fsdp2``, then ``dp2`` again.
Trials of real ranks are in test_handover.py.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evidence import Evidence

from seatrial.chaos.case import Leg, Resharded
from seatrial.chaos.errors import ImpossibleFaultError
from seatrial.chaos.launch.plan import World
from seatrial.chaos.route import Hop, Route, descent_of
from seatrial.chaos.schedule import Schedule, Shape, require_possible
from seatrial.chaos.trajectory import Trajectory, read_trajectory
from seatrial.chaos.verdict import Judgement, Verdict

DP2, FSDP2 = (World(ranks=2, topology=name, device="cpu") for name in ("dp2", "fsdp2"))
KILLS = "kill rank=1 at=step:3/data; kill rank=1 at=step:5/data attempt=2"
KILLED: dict[str, Any] = {
    "ending": "failed", "exits": {0: 1, 1: -signal.SIGKILL}, "cause": "killed",
}  # fmt: skip

Judge = Callable[..., Judgement]


@pytest.fixture
def judged(tmp_path: Path) -> Judge:
    """``judged({2: …}, {3: …})`` judges the run, with what differs in its attempts 2 and 3.

    ``legs`` replaces what attempts are compared with.
    """

    def evidence(name: str, steps: range, **facts: Any) -> Evidence:
        made = Evidence(tmp_path / name)
        made.attempt(steps, **facts)
        return made

    def run(
        second: dict[str, Any] | None = None,
        third: dict[str, Any] | None = None,
        legs: dict[int, Leg] | None = None,
    ) -> Judgement:
        reference = evidence("reference", range(1, 7), published=(2, 4, 6), valid=(4, 6))
        there = evidence("there", range(3, 7), restored=2)
        back = evidence("back", range(5, 7), restored=4)
        run = evidence("run", range(1, 3), published=(2,), valid=(2,), **KILLED)
        run.strike(KILLS.split("; ")[0], step=3)
        run.strike(KILLS.split("; ")[1], attempt=2, fault=1)
        normal: dict[str, Any] = {"restored": 2, "source": 1, "published": (4,), "valid": (2, 4)}
        run.attempt(range(3, 5), **normal | KILLED | (second or {}))
        last: dict[str, Any] = {"restored": 4, "source": 2, "published": (6,), "valid": (4, 6)}
        third = third or {}
        run.attempt(third.pop("steps", range(5, 7)), **last | third)
        known = {
            1: Leg(oracle=read_trajectory(reference.run)),
            2: Leg(oracle=read_trajectory(there.run), since=2),
            3: Leg(oracle=read_trajectory(back.run), since=4),
        }
        resharded = Resharded(route=Route((DP2, FSDP2, DP2)), legs=known if legs is None else legs)
        return run.judged(reference, KILLS, resharded=resharded)

    return run


def test_every_leg_equal_to_its_own_oracle_is_recovered(judged: Judge) -> None:
    judgement = judged()
    assert judgement.verdict is Verdict.RECOVERED, judgement.reason
    assert judgement.steps_lost == 0


@pytest.mark.parametrize(
    ("second", "third", "verdict", "says"),
    [
        (
            {},
            {"restored": 2, "source": 1, "steps": range(3, 7)},
            Verdict.LOST_WORK,
            "attempt 3 resumed from step 2, though the checkpoint of step 4 was valid",
        ),
        (
            {"restored": None, "source": None},
            {},
            Verdict.NOT_EXERCISED,
            "no checkpoint was restored onto fsdp2 in attempt 2",
        ),
        (
            {"valid": (2,), "damaged": {4: "digest"}},
            {},
            Verdict.TORN,
            "after attempt 2 the published checkpoint of step 4 is damaged",
        ),
        ({"valid": (2,)}, {}, Verdict.TORN, "acknowledged the checkpoint of step 4"),
        (
            {"wrong_at_start": "optimizer"},
            {},
            Verdict.DIVERGED,
            "attempt 2, right after the restore of step 2 onto fsdp2: optimizer",
        ),
        ({"wrong": {4: "scheduler"}}, {}, Verdict.DIVERGED, "attempt 2, step 4: scheduler"),
        (
            {},
            {"wrong_at_start": "sampler"},
            Verdict.DIVERGED,
            "attempt 3, right after the restore of step 4 onto dp2: sampler",
        ),
        ({}, {"wrong": {6: "model"}}, Verdict.DIVERGED, "attempt 3, step 6: model"),
        ({}, {"steps": range(5, 6)}, Verdict.UNRECOVERABLE, "[1, 2, 3, 4, 5] instead of"),
    ],
)
def test_what_is_wrong_in_a_leg_is_found_there(
    judged: Judge, second: dict[str, Any], third: dict[str, Any], verdict: Verdict, says: str
) -> None:
    judgement = judged(second, third)
    assert judgement.verdict is verdict, judgement.reason
    assert says in judgement.reason


@pytest.mark.parametrize(
    ("event", "began", "verdict"),
    [
        ("storage/read", False, Verdict.RECOVERED),
        ("restore/load", False, Verdict.RECOVERED),
        ("data", False, Verdict.NOT_EXERCISED),
        ("storage/read", True, Verdict.NOT_EXERCISED),  # after a fresh start
    ],
)
def test_a_rank_that_died_while_it_read_its_checkpoint_was_restoring(
    tmp_path: Path, event: str, began: bool, verdict: Verdict
) -> None:
    reference, run = Evidence(tmp_path / "reference"), Evidence(tmp_path / "run")
    reference.attempt(range(1, 7), published=(2, 4, 6), valid=(4, 6))
    run.strike("kill", step=3)
    run.attempt(range(1, 3), published=(2,), valid=(2,), **KILLED)
    run.strike("kill", rank=0, fault=1, attempt=2, event=event, step=2)
    exits = {1: 1, 0: -signal.SIGKILL}
    silent = () if began else (0, 1)
    run.attempt((), silent=silent, valid=(2,), **KILLED | {"exits": exits})
    run.attempt(range(3, 7), restored=2, source=1, published=(4, 6), valid=(4, 6))
    leg = Leg(oracle=read_trajectory(reference.run))
    judgement = run.judged(
        reference,
        f"kill rank=1 at=step:3/data; kill rank=0 at={event} attempt=2",
        resharded=Resharded(route=Route((DP2, FSDP2, DP2)), legs=dict.fromkeys((1, 2, 3), leg)),
    )
    assert judgement.verdict is verdict, judgement.reason


def test_a_leg_that_nothing_can_be_compared_with_never_passes(judged: Judge) -> None:
    judgement = judged(legs={})
    assert judgement.verdict is Verdict.UNRECOVERABLE
    assert "nothing tells what attempt 1 must equal" in judgement.reason


def trajectory(tmp_path: Path, *beginnings: tuple[int | None, int | None]) -> Trajectory:
    """Attempts that restored a step that another attempt saved."""
    made = Evidence(tmp_path / "descent")
    for restored, source in beginnings:
        made.attempt([], restored=restored, source=source)
    return read_trajectory(made.run)


@pytest.mark.parametrize(
    ("beginnings", "descent"),
    [
        ([(None, None)], (Hop(DP2),)),
        ([(None, None), (2, 1)], (Hop(DP2), Hop(FSDP2, 2))),
        ([(None, None), (2, 1), (4, 2)], (Hop(DP2), Hop(FSDP2, 2), Hop(DP2, 4))),
        # Whoever was killed in between left no trace in what is restored.
        ([(None, None), (2, 1), (2, 1)], (Hop(DP2),)),
        # Saved and restored on the same topology again: the same run goes on.
        ([(None, None), (2, 1), (4, 2), (6, 3)], (Hop(DP2), Hop(FSDP2, 2), Hop(DP2, 4))),
        ([(None, None), (None, None)], (Hop(FSDP2),)),
        ([(None, None), (2, 2)], None),
        ([(None, None), (2, None)], None),
        ([(None, None), (2, 7)], None),
        ([(None, None), (2, 1), (2, 2)], None),
    ],
)
def test_a_state_descends_from_the_worlds_it_has_passed_through(
    tmp_path: Path, beginnings: list[tuple[int | None, int | None]], descent: object
) -> None:
    route = Route((DP2, FSDP2, DP2))
    assert descent_of(len(beginnings), route, trajectory(tmp_path, *beginnings)) == descent


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("kill rank=3 at=step:4/data attempt=2", ""),
        ("kill rank=3 at=step:4/data", ""),
        ("kill rank=3 at=restore/load", ""),
        ("kill node=1 at=step:4/data attempt=2", ""),
        ("kill rank=2 at=step:4/data attempt=1", "attempt 1 has 2 ranks on 1 node(s)"),
        ("kill rank=1 at=step:4/data attempt=3", "attempt 3 has 1 ranks on 1 node(s)"),
        ("kill rank=1 at=step:4/data attempt=4", "attempt 4 has 1 ranks on 1 node(s)"),
        ("kill rank=4 at=step:4/data", "the job has 4 ranks on 2 node(s)"),
    ],
)
def test_a_fault_is_possible_where_an_attempt_has_its_rank(fault: str, says: str) -> None:
    shape = Shape(
        world_size=2, ranks_per_node=2, steps=8, checkpoint_interval=2, later=((4, 2), (1, 1))
    )
    others = "kill rank=0 at=step:3/data; kill rank=0 at=step:5/data attempt=2"
    third = "kill rank=0 at=step:7/data attempt=3"
    schedule = Schedule.parse(f"{others}; {third}; {fault}")
    if not says:
        require_possible(schedule, shape)
        return
    with pytest.raises(ImpossibleFaultError) as refused:
        require_possible(schedule, shape)
    assert says in str(refused.value)
