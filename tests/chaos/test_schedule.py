"""Schedules as one line, and the refusal of faults that can never fire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.chaos.errors import FaultSyntaxError, ImpossibleFaultError
from seatrial.chaos.events import COMMIT_PROTOCOL, EVENTS
from seatrial.chaos.schedule import Schedule, Shape, require_possible

SHAPE = Shape(world_size=4, ranks_per_node=2, steps=22, checkpoint_interval=5)

_LINES = st.sampled_from(
    [
        "kill rank=1 at=step:12/backward",
        "kill rank=0 at=restore attempt=2",
        "stop rank=* at=data resume=0.5",
        "terminate node=0 at=step:3 grace=1e-05",
        "flip rank=1 at=optimizer part=objects",
    ]
)


@given(st.lists(_LINES), st.integers(0, 2**63))
def test_what_a_schedule_prints_parses_back_to_it(lines: list[str], seed: int) -> None:
    schedule = Schedule(Schedule.parse("; ".join(lines) or "clean").faults, seed)
    assert Schedule.parse(str(schedule)) == schedule
    assert "\n" not in str(schedule)


def test_a_schedule_without_faults_is_clean() -> None:
    assert Schedule.parse("clean") == Schedule()
    assert str(Schedule()) == "clean"
    assert Schedule().label == "clean"


def test_a_seed_comes_first() -> None:
    schedule = Schedule.parse("seed=7; flip rank=1 at=data")
    assert schedule.seed == 7
    assert str(schedule) == "seed=7; flip rank=1 at=data"


def test_a_negative_seed_cannot_be_made() -> None:
    with pytest.raises(FaultSyntaxError, match="seed"):
        Schedule(seed=-1)


@pytest.mark.parametrize("text", ["", ";", "kill rank=1 at=data;", "kill rank=1 at=data;; clean"])
def test_an_empty_fault_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(FaultSyntaxError, match="'clean' for none") as caught:
        Schedule.parse(text)
    assert "\n" not in str(caught.value)


def test_a_wrong_fault_in_a_schedule_is_named() -> None:
    with pytest.raises(FaultSyntaxError, match="'kil rank=1 at=data': unknown fault 'kil'"):
        Schedule.parse("kill rank=0 at=data; kil rank=1 at=data")


def test_a_label_names_actions_and_places() -> None:
    schedule = Schedule.parse("kill rank=1 at=step:12/backward; kill rank=0 at=restore attempt=2")
    assert schedule.label == "kill[rank1-step12-backward+rank0-restore-attempt2]"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("kill rank=4 at=data", "4 ranks"),
        ("kill node=2 at=data", r"2 node\(s\)"),
        ("kill rank=0 at=step:23/data", "ends at step 22"),
        ("kill rank=0 at=step:0/data", "count from 1"),
        ("kill rank=0 at=step:5/start", "does not belong to a step"),
        ("kill rank=0 at=step:22/exit", "does not belong to a step"),
        ("kill rank=0 at=step:7/checkpoint", "no checkpoint is saved at step 7"),
        ("kill rank=0 at=step:21/checkpoint/*", "no checkpoint is saved at step 21"),
        ("kill rank=1 at=checkpoint/manifest/link", "only rank 0"),
        ("kill node=1 at=step:10/checkpoint/manifest/*", "only rank 0"),
        ("kill rank=3 at=step:10/checkpoint/gather", "only rank 0"),
        ("kill rank=1 at=restore", "nothing is restored"),
        ("kill rank=* at=step:10/restore/load", "nothing is restored"),
        ("kill rank=1 at=restore; tear rank=1 at=step:6/data", "nothing is restored"),
        ("kill rank=1 at=restore; kill rank=0 at=restore", "nothing is restored"),
        ("kill rank=1 at=restore; kill rank=0 at=data attempt=2", "nothing is restored"),
        ("kill rank=1 at=data; kill rank=1 at=restore attempt=1", "nothing is restored"),
        ("kill rank=1 at=data; kill rank=0 at=restore/quarantine", "nothing is quarantined"),
        ("kill rank=1 at=data attempt=2", "no attempt 2"),
        ("kill rank=1 at=data attempt=2; flip rank=1 at=step:6/data", "no attempt 2"),
        ("kill rank=1 at=data attempt=2; kill rank=1 at=data attempt=2", "no attempt 2"),
        ("kill rank=1 at=data; kill rank=1 at=data attempt=3", "no attempt 3 .* end 2 attempts"),
        ("kill rank=1 at=data; kill rank=1 at=restore attempt=3", "no attempt 3"),
        (
            "kill rank=1 at=data persistent=yes attempt=1; kill rank=1 at=data attempt=3",
            "no attempt 3",
        ),
        ("terminate rank=1 at=step:22/backward", "nothing is left to be preempted"),
        ("terminate rank=1 at=exit", "nothing is left to be preempted"),
        ("kill rank=1 at=step nth=23", "happens at most 22 times"),
        ("kill rank=1 at=step:3 nth=2", "happens at most 1 time"),
        ("kill rank=1 at=start nth=2", "happens at most 1 time"),
    ],
)
def test_a_fault_that_can_never_fire_is_refused(text: str, why: str) -> None:
    with pytest.raises(ImpossibleFaultError, match=why) as caught:
        require_possible(Schedule.parse(text), SHAPE)
    assert "can never fire" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "clean",
        "kill rank=3 at=start",
        "kill rank=3 at=exit when=after",
        "terminate rank=0 at=step:21/optimizer",
        "kill rank=0 at=step:22/optimizer",
        "kill rank=0 at=step:22/checkpoint",
        "kill rank=0 at=step:10/checkpoint/manifest/link",
        "kill rank=* at=checkpoint/manifest/link",
        "kill node=0 at=checkpoint/gather",
        "kill rank=1 at=step:10/checkpoint/*",
        "kill rank=1 at=backward nth=40",
        "kill rank=1 at=data persistent=yes",
        "kill rank=1 at=step:12/data; kill rank=1 at=restore",
        "kill rank=1 at=restore; kill rank=1 at=step:12/data",
        "kill rank=1 at=step:12/data; kill rank=0 at=step:10/restore",
        "kill rank=1 at=step:12/data; kill rank=0 at=data attempt=2",
        "kill rank=1 at=data; kill rank=0 at=restore attempt=2; kill rank=0 at=data attempt=3",
        "kill rank=1 at=data persistent=yes; kill rank=0 at=data attempt=3",
        "kill rank=1 at=data; kill rank=0 at=data; kill rank=0 at=step:8/data attempt=3",
        "raise rank=* at=data; kill rank=0 at=data attempt=3",
        "terminate rank=1 at=step:11/data; kill rank=0 at=step:11/checkpoint",
        "short rank=1 at=storage/write; kill rank=1 at=data; kill rank=0 at=restore/quarantine",
    ],
)
def test_a_fault_that_can_fire_is_accepted(text: str) -> None:
    require_possible(Schedule.parse(text), SHAPE)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
def test_rank_0_can_be_struck_at_every_event(event: object) -> None:
    name = getattr(event, "name", "")
    # Nothing is quarantined unless something is damaged.
    text = f"tear rank=1 at=step:12/data; kill rank=1 at=step:12/data; kill rank=0 at={name}"
    require_possible(Schedule.parse(text), SHAPE)


def test_the_commit_protocol_is_listed_in_the_order_of_a_save() -> None:
    names = [event.name for event in COMMIT_PROTOCOL]
    order = ["checkpoint", "checkpoint/shard/write", "checkpoint/report", "checkpoint/gather"]
    order += ["checkpoint/manifest/link", "checkpoint/acknowledge", "checkpoint/collect"]
    assert [name for name in names if name in order] == order
