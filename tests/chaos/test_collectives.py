"""On real ranks: every call is seen, every fault of a call does what it says, and is found.

What trials make of it is in `test_bending`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from seatrial.chaos.launch.plan import calls_file
from seatrial.chaos.run import Run
from seatrial.recovery.collectives import read_calls
from seatrial.recovery.collectives.log import UNDER_WAY

Steps = Callable[..., Run]

ENTRY = "collective_programs"


@pytest.fixture
def steps(supervise_program: Callable[..., Run]) -> Steps:
    """``steps("two_lines", "reorder rank=1 …")`` runs three steps of a program on two ranks."""

    def run(program: str, schedule: str = "clean", **more: Any) -> Run:
        options = {"silence_s": 3.0} | more
        return supervise_program("steps", schedule, module=ENTRY, named=program, **options)

    return run


def records(run: Run, kind: str, rank: int = 0) -> list[Any]:
    return [record for record in run.trace(1, rank) if record["kind"] == kind]


def results(run: Run, rank: int = 0) -> list[Any]:
    return [record["values"] for record in records(run, "result", rank)]


def found(run: Run) -> str:
    """What both ranks said of a mismatch, the same on both."""
    said = {record["said"] for rank in (0, 1) for record in records(run, "mismatch", rank)}
    assert len(said) == 1
    assert all(records(run, "mismatch", rank) for rank in (0, 1))
    return str(said.pop())


@pytest.fixture(scope="module")
def seeing(supervise_program: Callable[..., Run]) -> Run:
    run = supervise_program("every_call", module=ENTRY)
    assert run.completed, run.attempts[0].output
    return run


def seen(run: Run, by: str) -> Any:
    return next(record for record in records(run, "seen") if record["by"] == by)


@pytest.mark.parametrize("by", ["plain", "objects", "functional", "ddp", "fsdp", "messages"])
def test_gloo_has_run_nothing_that_was_not_seen(seeing: Run, by: str) -> None:
    found = seen(seeing, by)
    assert sum(found["calls"].values()) == found["run"] > 0


def test_calls_of_the_program_have_their_names(seeing: Run) -> None:
    assert seen(seeing, "list")["calls"] == {"reduce_scatter": 1}
    assert seen(seeing, "plain")["calls"] == dict.fromkeys(
        (
            *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor"),
            *("reduce_scatter_tensor", "all_to_all_single", "gather", "scatter", "barrier"),
        ),
        1,
    )


def test_the_reducer_of_ddp_is_seen(seeing: Run) -> None:
    assert seen(seeing, "ddp")["calls"]["all_reduce"] >= 1


def test_sharding_is_seen(seeing: Run) -> None:
    calls = seen(seeing, "fsdp")["calls"]
    assert {"all_gather_into_tensor", "reduce_scatter_tensor"} <= calls.keys()


def test_the_backend_keeps_its_name(seeing: Run) -> None:
    assert records(seeing, "backend")[0]["name"] == "gloo"


def test_a_group_that_was_destroyed_is_forgotten(supervise_program: Callable[..., Run]) -> None:
    run = supervise_program("remade_groups", module=ENTRY)
    assert records(run, "known")[0]["names"] == ["default_pg"]


def test_the_log_has_what_was_called_and_from_where(seeing: Run) -> None:
    call = read_calls(calls_file(seeing.directory, 1, 0))[0]
    assert (call.operation, call.group, call.ranks) == ("all_reduce", "default_pg", (0, 1))
    assert (call.shapes, call.size_bytes, call.sequence) == ("4 float32 SUM", 16, 1)
    assert "collective_programs.py" in call.site
    assert call.site.endswith("in every_call")
    assert call.seconds is not None


def test_more_calls_than_are_kept(supervise_program: Callable[..., Run]) -> None:
    run = supervise_program("more_than_are_kept", module=ENTRY)
    assert run.completed, run.attempts[0].output
    (kept,) = records(run, "kept")
    assert kept["kept"] == [4, 1496, 1500]
    assert kept["left"] == [0, 0, 1500]
    calls = read_calls(calls_file(run.directory, 1, 0))
    assert [call.number for call in calls] == list(range(477, 1501))
    # The first call was waited for too, but its place is another's.
    assert [call.number for call in calls if not call.waits] == [1500]


@pytest.mark.parametrize(
    ("program", "explanations"),
    [
        ("two_lines", [0, 0, 0]),
        ("messages", [0, 0, 0]),
        # Lines that stand for each other are found once.
        ("branches", [1, 1, 1]),
        ("takes_turns", [1, 1, 1]),
        # What one rank alone knows of has to be told each time.
        ("late_messages", [1, 2, 3]),
    ],
)
def test_ranks_that_agree_are_left_alone(
    steps: Steps, program: str, explanations: list[int]
) -> None:
    run = steps(program)
    assert run.completed, run.attempts[0].output
    for rank in (0, 1):
        told = [record["explanations"] for record in records(run, "result", rank)]
        assert told == explanations


def test_a_call_that_one_rank_left_out_at_the_end_is_missed(steps: Steps) -> None:
    said = found(steps("skips_the_last"))
    assert said.startswith("step 2: COLLECTIVE_MISSING in group default_pg (ranks 0, 1), call 4")
    assert "rank 0 called all_reduce(4 float32 SUM)" in said
    assert said.endswith("rank 1 did not")


def test_a_swap_computes_wrong_numbers_and_both_lines_are_named(steps: Steps) -> None:
    run = steps("two_lines", "reorder rank=1 at=step:2/collective/all_reduce")
    said = found(run)
    assert said.startswith(
        "step 2: COLLECTIVE_ORDER_MISMATCH in group default_pg (ranks 0, 1), call 3: rank 0 "
        "called all_reduce(4 float32 SUM) at "
    )
    lines = [int(part.split()[0]) for part in said.split("collective_programs.py:")[1:]]
    assert lines[1] == lines[0] + 1


def test_a_swap_of_calls_that_are_waited_for_does_nothing(steps: Steps) -> None:
    run = steps("one_of_each", "reorder rank=1 at=step:2/collective/all_reduce")
    assert run.completed
    assert results(run) == results(steps("one_of_each"))
    assert "waited for" in records(run, "bent", 1)[0]["unable"]


def test_a_swap_across_groups_under_gloo_changes_nothing(steps: Steps) -> None:
    run = steps("two_groups", "reorder rank=1 at=step:2/collective/all_reduce across=yes")
    assert run.completed
    assert results(run) == results(steps("two_groups"))
    assert "made after the next one" in records(run, "bent", 1)[0]["what"]


def test_swapped_messages_arrive_in_each_other_s_place(steps: Steps) -> None:
    run = steps("messages", "reorder rank=0 at=step:2/collective/send")
    assert results(run, 1) == [[10.0, 11.0], [21.0, 20.0], [30.0, 31.0]]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("wrong-reduction", "SIZE_OR_SYNTAX_MISMATCH"),
        ("wrong-dtype", "COLLECTIVE_DTYPE_MISMATCH"),
    ],
)
def test_a_fault_that_gloo_lets_pass_is_found(steps: Steps, fault: str, says: str) -> None:
    run = steps("one_of_each", f"{fault} rank=1 at=step:2/collective/all_reduce")
    assert says in found(run)
    assert [record["type"] for record in records(run, "error", 1)] == ["CollectiveMismatchError"]


@pytest.mark.parametrize(
    ("fault", "absent", "call"),
    [
        ("skip rank=1 at=step:2/collective/barrier", 1, "barrier #6"),
    ],
)
def test_who_did_not_come_to_a_call_is_named_where_others_wait(
    steps: Steps, fault: str, absent: int, call: str
) -> None:
    attempt = steps("one_of_each", fault).attempts[0]
    assert attempt.ending == "hung"
    assert f"rank {absent} did not come to {call} of group default_pg" in attempt.cause
    assert f"where rank {1 - absent} waits" in attempt.cause


def test_a_hang_shows_where_each_rank_is(steps: Steps) -> None:
    attempt = steps("one_of_each", "drop rank=1 at=step:3/collective/all_reduce").attempts[0]
    stacks = "\n".join(attempt.stacks)
    by_rank = stacks.split("rank 1, newest frame first:")
    assert by_rank[0].startswith("rank 0, newest frame first:")
    assert all("collective_programs.py" in each for each in by_rank)
    assert "chaos/collectives/works.py" in by_rank[1].splitlines()[1]  # where the fault waits


def test_a_stopped_rank_shows_no_stack(steps: Steps) -> None:
    attempt = steps("one_of_each", "stop rank=1 at=step:3/collective/all_reduce").attempts[0]
    assert "rank 1: no stack, it did not answer" in attempt.stacks
    assert "rank 1 is stopped, and answers nothing" in attempt.stacks


def test_the_last_record_of_a_killed_rank_is_the_call_it_died_in(steps: Steps) -> None:
    run = steps("one_of_each", "kill rank=1 at=step:2/collective/all_reduce when=after")
    last = read_calls(calls_file(run.directory, 1, 1))[-1]
    assert (last.operation, last.sequence, last.state) == ("all_reduce", 5, UNDER_WAY)
    assert (
        run.attempts[0].calls[1].startswith("rank 1: last call all_reduce #5 of group default_pg")
    )


def test_a_call_that_a_rank_was_killed_before_is_not_its_last(steps: Steps) -> None:
    run = steps("one_of_each", "kill rank=1 at=step:2/collective/all_reduce")
    assert read_calls(calls_file(run.directory, 1, 1))[-1].operation == "broadcast"


def test_only_calls_of_the_named_group_count(steps: Steps) -> None:
    run = steps("two_groups", "garble rank=1 at=step:2/collective/* group=blue")
    (bent,) = records(run, "bent", 1)
    assert bent["call"].startswith("all_reduce of group blue at ")


def test_so_it_is_for_faults_of_the_process(steps: Steps) -> None:
    run = steps("two_groups", "kill rank=1 at=step:2/collective/* group=blue when=after")
    last = read_calls(calls_file(run.directory, 1, 1))[-1]
    assert (last.group, last.sequence) == ("blue", 2)


def test_a_fault_at_another_event_is_for_the_next_call(steps: Steps) -> None:
    run = steps("one_of_each", "garble rank=1 at=step:2")
    (bent,) = records(run, "bent", 1)
    assert bent["call"].startswith("broadcast of group default_pg at ")


@pytest.mark.parametrize(("to", "wrong"), [("nan", math.isnan), ("inf", math.isinf)])
def test_a_result_is_damaged_on_one_rank_alone(
    steps: Steps, to: str, wrong: Callable[[float], bool]
) -> None:
    run = steps("one_of_each", f"garble rank=1 at=step:2/collective/all_reduce to={to}")
    assert run.completed
    assert not any(map(wrong, results(run, 0)[1]))
    assert sum(map(wrong, results(run, 1)[1])) == 1


def test_one_bit_flips_the_same_one_for_the_same_seed(steps: Steps) -> None:
    fault = "garble rank=1 at=step:2/collective/all_reduce"
    clean = results(steps("one_of_each"), 1)[1]
    flipped = [results(steps("one_of_each", f"seed={n}; {fault}"), 1)[1] for n in (7, 7, 8)]
    assert sum(a != b for a, b in zip(clean, flipped[0], strict=True)) == 1
    assert flipped[0] == flipped[1] != flipped[2]


@pytest.mark.parametrize(
    ("program", "fault", "ending"),
    [
        ("one_of_each", "wrong-shape rank=1 at=step:2/collective/all_reduce", "failed"),
        # One number against two: gloo waits for the second for ever.
        ("one_number", "wrong-shape rank=1 at=step:2/collective/all_reduce", "hung"),
        ("one_of_each", "wrong-dtype rank=1 at=step:2/collective/all_reduce size=other", "failed"),
    ],
)
def test_other_sizes_end_the_attempt(steps: Steps, program: str, fault: str, ending: str) -> None:
    run = steps(program, fault)
    assert run.attempts[0].ending == ending
    assert "last call all_reduce #" in "".join(run.attempts[0].calls)


def test_ranks_that_wait_in_different_calls_are_named(steps: Steps) -> None:
    attempt = steps("one_number", "skip rank=1 at=step:2/collective/all_reduce").attempts[0]
    assert attempt.ending == "hung"
    assert "rank 1 called broadcast #3 of group default_pg" in attempt.cause
    assert "where rank 0 called all_reduce" in attempt.cause


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("wrong-reduction rank=1 at=step:2/collective/barrier", "barrier reduces nothing"),
        ("wrong-root rank=1 at=step:2/collective/all_reduce", "the root of all_reduce"),
        ("wrong-group rank=1 at=step:2/collective/all_reduce", "no other group"),
        ("wrong-shape rank=1 at=step:2/collective/barrier", "the shape of barrier"),
        ("garble rank=1 at=step:2/collective/barrier", "barrier has no payload"),
    ],
)
def test_what_does_not_apply_to_a_call_leaves_it_as_it_is(
    steps: Steps, fault: str, why: str
) -> None:
    run = steps("one_of_each", fault)
    assert run.completed
    assert why in records(run, "bent", 1)[0]["unable"]


@pytest.mark.parametrize("of", ["result", "input"])
def test_integers_that_cannot_become_nan_are_left_as_they_are(steps: Steps, of: str) -> None:
    fault = f"garble rank=1 at=step:2/collective/all_reduce to=nan of={of}"
    run = steps("whole_numbers", fault)
    assert run.completed, run.attempts[0].output
    (bent,) = records(run, "bent", 1)
    assert "all_reduce has no payload that could become nan" in bent["unable"]


def test_a_call_in_another_group_leaves_the_others_waiting(steps: Steps) -> None:
    attempt = steps("two_groups", "wrong-group rank=1 at=step:2/collective/all_reduce").attempts[0]
    assert attempt.ending == "hung"
    assert "the ranks wait for each other: rank 0 in all_reduce #2 of group red" in attempt.cause
    assert "; rank 1 in all_reduce #1 of group default_pg" in attempt.cause
