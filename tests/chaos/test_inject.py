"""Counting events and striking at exactly the right one, in the rank that announces them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from seatrial.chaos.errors import InjectedError
from seatrial.chaos.inject import Injector, Position
from seatrial.chaos.ledger import Ledger
from seatrial.chaos.schedule import Schedule
from seatrial.chaos.trace import TraceWriter, read_trace

Struck = Callable[..., list[str]]

STEP = ["step", "data", "forward", "backward", "forward", "backward", "optimizer"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def struck(tmp_path: Path, trace: Path) -> Struck:
    """``struck("raise rank=1 at=data")`` runs three steps in a rank: where it was struck."""
    (tmp_path / "strikes").mkdir()

    def run(schedule: str, *, rank: int = 1, attempt: int = 1, steps: int = 3) -> list[str]:
        position = Position(
            rank=rank,
            world_size=4,
            ranks_per_node=2,
            attempt=attempt,
            store=str(tmp_path),
            pids=tmp_path,
        )
        injector = Injector(
            Schedule.parse(schedule), position, Ledger(tmp_path / "strikes"), TraceWriter(trace)
        )
        found = []
        for step in range(1, steps + 1):
            for number, event in enumerate(STEP):
                for edge in ("before", "after"):
                    facts: dict[str, object] = {"step": step} if event == "step" else {}
                    try:
                        injector(event, edge, facts)
                    except InjectedError:
                        found.append(f"{step}.{number} {edge} {event}")
        return found

    return run


def test_a_fault_strikes_at_the_first_match_and_never_again(struck: Struck) -> None:
    assert struck("raise rank=1 at=backward") == ["1.3 before backward"]


def test_nth_counts_matches(struck: Struck) -> None:
    assert struck("raise rank=1 at=backward nth=3") == ["2.3 before backward"]


def test_nth_counts_matches_of_a_pattern(struck: Struck) -> None:
    assert struck("raise rank=1 at=*ward nth=6") == ["2.3 before backward"]


def test_after_strikes_when_the_event_is_over(struck: Struck) -> None:
    assert struck("raise rank=1 at=data when=after") == ["1.1 after data"]


def test_a_step_in_the_selector_counts_within_that_step(struck: Struck) -> None:
    assert struck("raise rank=1 at=step:3/forward nth=2") == ["3.4 before forward"]


def test_an_nth_that_is_not_reached_does_not_strike(struck: Struck) -> None:
    assert struck("raise rank=1 at=step:3/forward nth=3") == []


@pytest.mark.parametrize(
    ("whom", "ranks"), [("rank=2", [2]), ("rank=*", [0, 1, 2, 3]), ("node=1", [2, 3])]
)
def test_every_named_rank_is_struck_and_no_other(
    struck: Struck, whom: str, ranks: list[int]
) -> None:
    assert [rank for rank in range(4) if struck(f"raise {whom} at=data", rank=rank)] == ranks


def test_counting_starts_anew_in_every_attempt(struck: Struck) -> None:
    schedule = "raise rank=1 at=data nth=2"
    assert struck(schedule, attempt=1, steps=1) == []
    assert struck(schedule, attempt=2, steps=1) == []
    assert struck(schedule, attempt=3) == ["2.1 before data"]


def test_a_fault_that_struck_does_not_strike_in_the_next_attempt(struck: Struck) -> None:
    assert struck("raise rank=1 at=data", attempt=1) == ["1.1 before data"]
    assert struck("raise rank=1 at=data", attempt=2) == []


def test_a_persistent_fault_strikes_in_every_attempt_once(struck: Struck) -> None:
    for attempt in (1, 2, 3):
        found = struck("raise rank=1 at=data persistent=yes", attempt=attempt)
        assert found == ["1.1 before data"]


def test_a_fault_of_one_attempt_waits_for_it(struck: Struck) -> None:
    assert struck("raise rank=1 at=data attempt=2", attempt=1) == []
    assert struck("raise rank=1 at=data attempt=2", attempt=2) == ["1.1 before data"]


def test_two_faults_of_a_schedule_count_apart(struck: Struck) -> None:
    found = struck("raise rank=1 at=data nth=2; raise rank=1 at=data nth=3")
    assert found == ["2.1 before data", "3.1 before data"]


def test_an_event_is_traced_before_the_fault_strikes_at_it(struck: Struck, trace: Path) -> None:
    struck("raise rank=1 at=step:1/data", steps=1)
    told = [(r["kind"], r.get("event"), r.get("edge")) for r in read_trace(trace)]
    at = told.index(("strike", None, None))
    assert told[at - 1] == ("event", "data", "before")


def test_every_event_is_traced_with_its_step(struck: Struck, trace: Path) -> None:
    struck("clean", steps=2)
    records = read_trace(trace)
    assert len(records) == 2 * 2 * len(STEP)
    assert {record["step"] for record in records[: len(STEP)]} == {1}
    assert {record["step"] for record in records[-len(STEP) :]} == {2}


def test_a_save_in_the_background_and_the_training_have_a_step_each(
    tmp_path: Path, trace: Path
) -> None:
    (tmp_path / "strikes").mkdir()
    position = Position(
        rank=1, world_size=4, ranks_per_node=2, attempt=1, store=tmp_path, pids=tmp_path
    )
    schedule = Schedule.parse("raise rank=1 at=step:6/data; raise rank=1 at=data nth=4")
    injector = Injector(schedule, position, Ledger(tmp_path / "strikes"), TraceWriter(trace))
    injector("step", "before", {"step": 6})
    saving = Thread(target=lambda: injector("checkpoint/report", "before", {"step": 5}))
    saving.start()
    saving.join()
    with pytest.raises(InjectedError, match="step:6/data"):
        injector("data", "before", {})
    assert [(r["event"], r["step"]) for r in read_trace(trace) if r["kind"] == "event"] == [
        ("step", 6),
        ("checkpoint/report", 5),
        ("data", 6),
    ]


def test_threads_count_together(tmp_path: Path, trace: Path) -> None:
    (tmp_path / "strikes").mkdir()
    position = Position(
        rank=1, world_size=4, ranks_per_node=2, attempt=1, store=tmp_path, pids=tmp_path
    )
    schedule = Schedule.parse("raise rank=1 at=data nth=2000")
    injector = Injector(schedule, position, Ledger(tmp_path / "strikes"), TraceWriter(trace))
    struck = []

    def announce() -> None:
        for _ in range(500):
            try:
                injector("data", "before", {})
            except InjectedError:
                struck.append(1)

    threads = [Thread(target=announce) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert struck == [1]


def test_a_thread_without_a_step_has_one_only_in_collectives(struck: Struck, trace: Path) -> None:
    """What autograd's threads call belongs to the step; what a loader reads ahead, to none."""

    def announce(injector: Injector) -> None:
        injector("data/record", "before", {"record": 3})
        injector("collective/all_reduce", "before", {})

    position = Position(
        rank=1, world_size=4, ranks_per_node=2, attempt=1, store="", pids=trace.parent
    )
    ledger = Ledger(trace.parent / "strikes")
    injector = Injector(Schedule(), position, ledger, TraceWriter(trace))
    injector("step", "before", {"step": 7})
    thread = Thread(target=announce, args=(injector,))
    thread.start()
    thread.join()
    assert [record["step"] for record in read_trace(trace)] == [7, None, 7]
