"""Verifies what is made of a spoilt record by what its rank did since: used, refused, skipped, or
only read ahead. Jobs of real ranks that read records are in test_records."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from evidence import Evidence

from seatrial.chaos.data import refused_a_record, unnoticed_records
from seatrial.chaos.ledger import Strike
from seatrial.chaos.run import Ending, Run

BEFORE, AFTER = (
    {"event": "data/record", "edge": edge, "record": 7} for edge in ("before", "after")
)
USES, SKIPS, NEITHER = {"samples": [0, [7]]}, {"skipped": [7]}, {"samples": [0, [3]]}
Doing = dict[str, Any]


def in_step(number: int, **outputs: Any) -> Doing:
    return {
        "step": number,
        "outputs": {"samples": [0, []], "padding": [], "skipped": [], **outputs},
    }


def rank_that(
    directory: Path, step: int | None, doings: Sequence[Doing], *, ending: Ending
) -> Evidence:
    """A run in which record 7 was spoilt in rank 1's hands, in ``step``, between steps 2 and 3."""
    run = Evidence(directory / "run")
    run.record(1, 1, "step", **in_step(2, **USES))
    for doing in (BEFORE, {"fault": 0, "step": step, "record": 7}, *doings):
        kind = "event" if "event" in doing else "spoilt" if "fault" in doing else "step"
        run.record(1, 1, kind, **doing)
    run.attempt([], ending=ending, silent=(0, 1))
    return run


@pytest.mark.parametrize("step", [None, 3])
@pytest.mark.parametrize(
    "doings",
    [
        pytest.param([in_step(3), in_step(4)], id="refused, and heard of later"),
        pytest.param([BEFORE, AFTER, in_step(3, **USES)], id="refused, and read again"),
        pytest.param([AFTER, in_step(3), in_step(4, **SKIPS)], id="read ahead, and skipped"),
        pytest.param([AFTER], id="in hand when the rank died"),
    ],
)
def test_a_record_that_was_not_used_is_no_corruption(
    tmp_path: Path, step: int | None, doings: list[Doing]
) -> None:
    run = rank_that(tmp_path, step, doings, ending="failed")
    assert list(unnoticed_records(run.run)) == []


def test_what_is_read_ahead_in_another_thread_when_the_rank_dies_was_not_used(
    tmp_path: Path,
) -> None:
    run = rank_that(tmp_path, None, [AFTER, in_step(3, **NEITHER)], ending="failed")
    assert list(unnoticed_records(run.run)) == []


@pytest.mark.parametrize("step", [None, 3])
@pytest.mark.parametrize(
    "doings",
    [
        pytest.param([AFTER, in_step(3, **USES)], id="used at once"),
        pytest.param([AFTER, in_step(3), in_step(4, **USES)], id="read ahead, and used"),
        pytest.param([AFTER, in_step(3), in_step(4, padding=[7])], id="used to fill a batch up"),
        pytest.param([AFTER, in_step(3, **NEITHER)], id="no word of it"),
        pytest.param(
            [AFTER, in_step(3), BEFORE, AFTER, in_step(4, **SKIPS)], id="another reading skipped"
        ),
    ],
)
def test_a_record_that_was_used_is_named(
    tmp_path: Path, step: int | None, doings: list[Doing]
) -> None:
    run = rank_that(tmp_path, step, doings, ending="completed")
    ((reason, _),) = unnoticed_records(run.run)
    assert "rank 1 read record 7 with a bit flipped" in reason


@pytest.mark.parametrize(
    ("error", "is_of_it"),
    [
        ({"message": "record 7 of /data does not have its digest"}, True),
        ({"message": "a worker died", "said": ["record 7 of /data does not"]}, True),
        ({"message": "record 17 of /data does not have its digest"}, False),
    ],
)
def test_a_rank_ends_of_a_spoilt_record_only_if_its_error_names_it(
    tmp_path: Path, error: Doing, is_of_it: bool
) -> None:
    run = rank_that(tmp_path, 3, [], ending="failed")
    run.fail(rank=1, attempt=1, t=11.0, **{"error": "DamagedRecordError", **error})
    where = {"rank": 1, "attempt": 1, "event": "data/record", "edge": "before", "step": 3}
    strike = Strike(fault=0, action="spoil", t=10.0, **where)  # type: ignore[arg-type]
    assert refused_a_record(run.run, strike) is is_of_it


def test_a_worker_is_in_no_step_whatever_its_rank_was_in_when_it_was_forked(
    supervise_program: Callable[..., Run],
) -> None:
    run = supervise_program("reads_in_a_worker", "spoil rank=0 at=step:1/data/record", ranks=1)
    spoilt = [record for record in run.trace(1, 0) if record["kind"] == "spoilt"]
    assert [(record["record"], record["step"]) for record in spoilt] == [(7, None)]


def test_a_kill_that_is_due_in_a_worker_is_of_its_rank(
    supervise_program: Callable[..., Run],
) -> None:
    run = supervise_program("reads_in_a_worker", "kill rank=0 at=step:1/data/record", ranks=1)
    assert run.attempts[0].exits == {0: -signal.SIGKILL}
