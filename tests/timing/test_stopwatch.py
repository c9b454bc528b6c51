"""What a rank records of each step, on a clock that the test moves, with the probe of jobs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from scripted_clock import ScriptedClock

from seatrial.chaos.timing.stopwatch import Stopwatch
from seatrial.chaos.timing.times import RECORD
from seatrial.chaos.trace import TraceWriter, read_trace
from seatrial.recovery.probe import around, listen, probe

Between = Callable[[str, str], None]


class Rank:
    """A rank's thread, on a clock: ``between`` is called where the injector listens."""

    def __init__(self, path: Path) -> None:
        self.clock = ScriptedClock()
        self.path = path
        self.trace = TraceWriter(path)
        self.watch = Stopwatch(self.trace, self.clock)
        self.between: Between = lambda event, edge: None

    def spans(self) -> dict[int, Any]:
        """Of each recorded step, in seconds: wall, cpu, starved, waited, hidden by span."""
        records = [each for each in read_trace(self.path) if each["kind"] == RECORD]
        return {
            int(str(each["step"])): {
                name: tuple(us / 1e6 for us in values)
                for name, values in each["spans"].items()  # type: ignore[attr-defined]
            }
            for each in records
        }


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path / "trace.jsonl")

    def injector(event: str, edge: str, facts: dict[str, object]) -> None:
        made.between(event, edge)

    with ExitStack() as stack:
        for listener in (made.watch.opens, injector, made.watch.closes):
            stack.callback(listen(listener))
        yield made
    made.trace.close()


def test_time_belongs_to_its_phase_and_the_rest_to_none(rank: Rank) -> None:
    with around("step", step=3):
        rank.clock.computes(1)
        with around("forward"):
            rank.clock.computes(2)
        with around("backward"):
            rank.clock.sleeps(4)
        with around("forward"):
            rank.clock.starves(8)
        rank.clock.sleeps(16)
    rank.clock.computes(32)
    with around("checkpoint", step=3):
        rank.clock.computes(64)
    assert rank.spans() == {
        3: {
            "outside": (17, 1, 0, 0, 0),
            "forward": (10, 2, 8, 0, 0),
            "backward": (4, 0, 0, 0, 0),
            "check": (32, 32, 0, 0, 0),
        }
    }


def test_a_save_within_a_step_belongs_to_no_phase_and_the_step_is_recorded(rank: Rank) -> None:
    for step in (1, 2, 3):
        with around("step", step=step):
            rank.clock.computes(1)
            if step == 2:
                with around("checkpoint", step=step):
                    rank.clock.sleeps(8)
            with around("forward"):
                rank.clock.computes(2)
    probe("exit", "before")
    plain = {"outside": (1, 1, 0, 0, 0), "forward": (2, 2, 0, 0, 0)}
    saved = plain | {"checkpoint": (8, 0, 0, 0, 0)}
    assert rank.spans() == {1: plain, 2: saved, 3: plain}


def test_time_belongs_to_the_inner_of_two_phases(rank: Rank) -> None:
    with around("step", step=1), around("backward"):
        rank.clock.computes(1)
        with around("forward"):
            rank.clock.computes(2)
        rank.clock.computes(4)
    probe("exit", "before")
    assert rank.spans()[1]["backward"][0] == 5
    assert rank.spans()[1]["forward"][0] == 2


@pytest.mark.parametrize("edge", ["before", "after"])
@pytest.mark.parametrize("event", ["step", "backward"])
def test_what_strikes_at_an_edge_of_a_phase_is_within_it(rank: Rank, event: str, edge: str) -> None:
    rank.between = lambda *at: rank.clock.sleeps(5) if at == (event, edge) else None
    with around("step", step=1), around("backward"):
        pass
    probe("exit", "before")
    assert rank.spans()[1] == {"outside" if event == "step" else event: (5, 0, 0, 0, 0)}


def test_a_delay_at_the_end_of_a_phase_is_no_wait_for_its_futures(rank: Rank) -> None:
    rank.between = lambda *at: rank.clock.sleeps(5) if at == ("backward", "after") else None
    with around("step", step=1), around("backward"):
        rank.watch.meter.took_future(rank.watch.meter.began(0.0))
        rank.clock.sleeps(2)
    probe("exit", "before")
    assert rank.spans()[1]["backward"] == (7, 0, 0, 2, 0)


def test_calls_from_before_a_step_hide_nothing_in_it(rank: Rank) -> None:
    rank.watch.meter.began(0.0)
    rank.clock.computes(5)
    with around("step", step=1):
        rank.clock.computes(1)
        call = rank.watch.meter.began(rank.clock.now.wall)
        rank.clock.computes(2)
        rank.watch.meter.waited(call, 8.0, 8.0, 0.0)
    probe("exit", "before")
    assert rank.spans()[1]["outside"] == (3, 3, 0, 0, 2)


def test_each_step_has_its_own_record(rank: Rank) -> None:
    for step in (1, 2):
        with around("step", step=step), around("data"):
            rank.clock.computes(step)
        rank.clock.computes(10 * step)
    probe("exit", "before")
    assert {
        step: (spans["data"][0], spans["check"][0]) for step, spans in rank.spans().items()
    } == {
        1: (1, 10),
        2: (2, 20),
    }


def test_a_step_that_was_not_completed_is_not_recorded(rank: Rank) -> None:
    with pytest.raises(RuntimeError), around("step", step=1), around("forward"):
        raise RuntimeError
    with around("step", step=2), around("forward"):
        rank.clock.computes(3)
    probe("exit", "before")
    assert rank.spans() == {2: {"forward": (3, 3, 0, 0, 0)}}


def test_a_phase_left_by_an_exception_that_the_job_survives_ends_with_the_one_around_it(
    rank: Rank,
) -> None:
    with around("step", step=1):
        with around("backward"):
            with pytest.raises(RuntimeError):
                fail_in("forward", rank.clock)
            rank.clock.computes(2)
        rank.clock.computes(4)
    probe("exit", "before")
    spans = rank.spans()[1]
    assert sum(values[0] for values in spans.values()) == 7
    assert spans["outside"][0] == 4


def fail_in(phase: str, clock: ScriptedClock) -> None:
    with around(phase):
        clock.computes(1)
        raise RuntimeError


def test_threads_in_the_background_are_not_timed(rank: Rank) -> None:
    def save() -> None:
        with around("checkpoint", step=1), around("forward"):
            rank.clock.computes(1)

    with around("step", step=1):
        thread = threading.Thread(target=save)
        thread.start()
        thread.join()
    probe("exit", "before")
    assert rank.spans() == {1: {"outside": (1, 1, 0, 0, 0)}}


def test_what_other_threads_went_without_in_the_step_is_recorded(rank: Rank) -> None:
    rank.clock.others = 100.0
    with around("step", step=1):
        rank.clock.others += 3.0
        rank.trace.blocked_s += 0.5  # a long write
    rank.clock.others += 7.0
    probe("exit", "before")
    (record,) = read_trace(rank.path)
    assert record["excuse"] == 3_500_000


def test_a_kernel_that_does_not_count_is_said_so(rank: Rank) -> None:
    rank.clock.knows_starved = False
    with around("step", step=1):
        rank.clock.computes(1)
    probe("exit", "before")
    assert [each["blind"] for each in read_trace(rank.path)] == [True]
