"""Which error, and which restore, counts as having come upon what a fault changed."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from evidence import Evidence, finish

from seatrial.chaos.verdict import Verdict

KILL = "kill rank=1 at=step:5/data"
KILLED: dict[str, Any] = {
    "ending": "failed", "exits": {0: 1, 1: -signal.SIGKILL}, "published": (2, 4), "cause": "killed",
}  # fmt: skip
FAILED: dict[str, Any] = {"ending": "failed", "exits": {0: 1, 1: 1}, "cause": "failed"}
SHARD, OBJECTS = "rank-00001.safetensors", "rank-00001.json"


def file_of(step: int, name: str = SHARD) -> str:
    return f"/store/step-{step:08}/attempt-1/{name}"


def altered(run: Evidence, text: str, *, fault: int, step: int, damages: bool = False) -> None:
    """Say that a fault of rank 1 altered a write of a shard."""
    run.strike(text, fault=fault, step=step, event="storage/write")
    facts = {"fault": fault, "event": "storage/write", "file": file_of(step), "change": "x"}
    run.record(1, 1, "operation", **facts, changed=True)
    if damages:
        run.record(1, 1, "damage", **facts, step=step)


@pytest.mark.parametrize(
    ("last", "failing", "message", "causes", "verdict"),
    [
        # Retried, and forgotten by the time that something else went wrong.
        (4, 0, "the peer is silent", ("TimeoutError",), Verdict.UNRECOVERABLE),
        (4, 1, "the disk is gone", ("OSError",), Verdict.UNRECOVERABLE),
        # Nothing else happened in between.
        (2, 1, "cannot save", ("OSError",), Verdict.RECOVERED),
        (2, 0, "rank 1 cannot save", ("OSError",), Verdict.RECOVERED),
        (2, 0, "cannot save", ("OSError",), Verdict.UNRECOVERABLE),
        (2, 0, "rank 10 cannot save", ("OSError",), Verdict.UNRECOVERABLE),
        # Noticed late, but told of.
        (3, 0, "I/O (injected by the fault '{fault}')", (), Verdict.RECOVERED),
    ],
)
def test_a_refusal_that_was_dealt_with_explains_no_later_failure(
    reference: Evidence,
    run: Evidence,
    last: int,
    failing: int,
    message: str,
    causes: tuple[str, ...],
    verdict: Verdict,
) -> None:
    text = "fail rank=1 at=step:2/storage/write"
    altered(run, text, fault=0, step=2)
    said = message.format(fault=text)
    run.fail(rank=failing, attempt=1, error="RuntimeError", causes=causes, t=11.0, message=said)
    published = tuple(range(2, last + 1, 2))
    run.attempt(range(1, last + 1), published=published, valid=published, **FAILED)
    resumed = published[-1]
    run.attempt(range(resumed + 1, 7), restored=resumed, source=1, published=(4, 6), valid=(4, 6))
    judgement = run.judged(reference, text)
    assert judgement.verdict is verdict, judgement.reason


LIE, REFUSAL = "corrupt rank=1 at=step:2/storage/write", "fail rank=1 at=step:6/storage/write"


@pytest.mark.parametrize(
    ("message", "verdict"),
    [
        (f"I/O (injected by the fault '{REFUSAL}'): {file_of(6)}", Verdict.NOT_EXERCISED),
        (f"I/O (injected by the fault '{REFUSAL}'): {file_of(2)}", Verdict.NOT_EXERCISED),
        (f"{file_of(6)} does not match its digest", Verdict.NOT_EXERCISED),
        (f"{file_of(2)} does not match its digest", Verdict.UNRECOVERABLE),  # and no refusal
    ],
)
def test_a_lie_is_noticed_only_by_who_names_its_file_for_no_other_reason(
    reference: Evidence, run: Evidence, message: str, verdict: Verdict
) -> None:
    altered(run, LIE, fault=0, step=2, damages=True)
    altered(run, REFUSAL, fault=1, step=6)
    run.fail(rank=1, attempt=1, error="SaveError", t=11.0, message=message)
    run.attempt(
        range(1, 6), published=(2, 4), valid=(4,), damaged={2: f"{file_of(2)}: digest"}, **FAILED
    )
    finish(run)
    schedule = f"{LIE}; {REFUSAL}"
    judgement = run.judged(reference, schedule)
    if verdict is Verdict.UNRECOVERABLE:
        assert judgement.verdict is not Verdict.NOT_EXERCISED
    else:
        assert judgement.verdict is verdict, judgement.reason
        assert LIE in judgement.reason


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        (f"{file_of(4)} does not match its digest", "part=objects"),
        (f"{file_of(4, OBJECTS)} does not match its digest", "shard"),
        (f"{file_of(4)} and {file_of(4, OBJECTS)} do not match", ""),
    ],
)
@pytest.mark.parametrize("is_reported", [True, False])
def test_each_of_two_damages_of_a_step_must_be_found(
    reference: Evidence, run: Evidence, found: str, missed: str, is_reported: bool
) -> None:
    flips = "flip rank=1 at=step:5/data; flip rank=1 at=step:5/data part=objects"
    for fault, name in enumerate((SHARD, OBJECTS)):
        run.strike("flip", fault=fault)
        file = file_of(4, name).removeprefix("/store/")
        run.record(1, 1, "damage", fault=fault, step=4, file=file, change="bit 0 flipped")
    run.strike("kill", fault=2)
    run.attempt(range(1, 5), valid=(2,), damaged={4: found}, **KILLED)
    run.attempt(
        range(3, 7),
        restored=2,
        source=1,
        published=(4, 6),
        valid=(4, 6),
        rejected={4: f"rank 1: {found}"} if is_reported else {},
    )
    judgement = run.judged(reference, f"{flips}; {KILL} when=after")
    if not missed:
        assert judgement.verdict is Verdict.RECOVERED, judgement.reason
        return
    assert judgement.verdict is Verdict.NOT_EXERCISED
    assert ("part=objects" in judgement.reason) == (missed == "part=objects")


def test_a_refusal_of_every_checkpoint_is_not_excused_by_the_damage_of_one(
    reference: Evidence, run: Evidence
) -> None:
    run.strike("flip", fault=0)
    run.strike("kill", fault=1)
    store: dict[str, Any] = {"valid": (2,), "damaged": {4: "digest"}}
    run.attempt(range(1, 5), damage=(4,), **store, **KILLED)
    run.attempt((), silent=(0, 1), error="NoValidCheckpointError", **store, **FAILED)
    run.attempt(range(3, 7), restored=2, source=1, published=(4, 6), valid=(4, 6))
    judgement = run.judged(reference, f"flip rank=1 at=step:5/data; {KILL}")
    assert judgement.verdict is Verdict.UNRECOVERABLE, judgement.reason
    assert "attempt 2 failed though no fault struck in it" in judgement.reason


def test_a_refusal_is_excused_if_the_only_other_checkpoint_was_read_wrongly(
    reference: Evidence, run: Evidence
) -> None:
    corrupt = "corrupt rank=1 at=storage/read attempt=2"
    run.strike("kill", fault=0, step=3)
    run.attempt(range(1, 3), valid=(2,), **KILLED | {"published": (2,)})
    run.strike(corrupt, fault=1, attempt=2, step=2, event="storage/read")
    facts = {"fault": 1, "event": "storage/read", "file": file_of(2), "change": "x"}
    run.record(1, 2, "operation", **facts, changed=True)
    run.record(1, 2, "damage", **facts, step=2)
    run.attempt((), silent=(0, 1), error="NoValidCheckpointError", valid=(2,), **FAILED)
    run.attempt(range(3, 7), restored=2, source=1, published=(4, 6), valid=(4, 6))
    judgement = run.judged(reference, f"kill rank=1 at=step:3/data; {corrupt}")
    assert judgement.verdict is Verdict.RECOVERED, judgement.reason


FLIP_IN_RESTORE = "flip rank=1 at=restore/load attempt=2"
AGAIN = "kill rank=1 at=step:5/data attempt=2"


@pytest.mark.parametrize(
    ("restored", "verdict"), [(2, Verdict.RECOVERED), (4, Verdict.CORRUPTION_UNDETECTED)]
)
def test_damage_behind_the_back_of_a_restore_is_met_by_the_next(
    reference: Evidence, run: Evidence, restored: int, verdict: Verdict
) -> None:
    run.strike("kill", fault=0)
    run.attempt(range(1, 5), valid=(2, 4), **KILLED)
    run.strike("flip", fault=1, attempt=2, step=4, event="restore/load")
    flipped = {"step": 4, "file": file_of(4).removeprefix("/store/"), "change": "bit 0 flipped"}
    run.record(1, 2, "damage", fault=1, **flipped)
    run.strike("kill", fault=2, attempt=2)
    store: dict[str, Any] = {"valid": (2,), "damaged": {4: "digest"}}
    run.attempt((), restored=4, source=1, **store, **KILLED | {"published": ()})
    run.attempt(range(restored + 1, 7), restored=restored, source=1, published=(4, 6), valid=(4, 6))
    judgement = run.judged(reference, f"{KILL}; {FLIP_IN_RESTORE}; {AGAIN}")
    assert judgement.verdict is verdict, judgement.reason


def test_damage_in_a_restore_that_fell_back_was_met_by_it(
    reference: Evidence, run: Evidence
) -> None:
    run.strike("kill", fault=0)
    run.attempt(range(1, 5), valid=(2, 4), **KILLED)
    text = "flip rank=1 at=restore/agree attempt=2"
    run.strike("flip", fault=1, attempt=2, step=4, event="restore/agree")
    flipped = {"step": 4, "file": file_of(4).removeprefix("/store/"), "change": "bit 0 flipped"}
    run.record(1, 2, "damage", fault=1, **flipped)
    rejected = {4: f"rank 1: {file_of(4)} does not match its digest"}
    run.attempt(
        range(3, 7),
        restored=2, source=1, rejected=rejected, published=(4, 6), valid=(4, 6),
    )  # fmt: skip
    judgement = run.judged(reference, f"{KILL}; {text}")
    assert judgement.verdict is Verdict.RECOVERED, judgement.reason


@pytest.mark.parametrize(
    ("named", "is_it"),
    [
        ("/data/ckpt-4/rank-1", True),
        ("'ckpt-4/rank-1'.", True),
        ("/logs/rank-1", False),
        ("/logs/rank-10.log", False),
        ("/data/ckpt-4/rank-10", False),
        ("/data/ckpt-4/rank-1.log", False),
        ("/data/old-ckpt-4/rank-1", False),
    ],
)
def test_an_error_names_a_file_by_more_than_its_last_name(
    reference: Evidence, run: Evidence, named: str, is_it: bool
) -> None:
    corrupt = "corrupt rank=1 at=step:4/storage/write"
    run.strike(corrupt, fault=0, step=4, event="storage/write")
    facts = {"fault": 0, "event": "storage/write", "file": "/data/ckpt-4/rank-1", "change": "x"}
    run.record(1, 1, "operation", **facts, changed=True)
    run.fail(rank=0, attempt=1, error="RuntimeError", t=11.0, message=f"no space for {named}")
    run.attempt(range(1, 5), published=(2, 4), valid=(2, 4), **FAILED)
    finish(run)
    judgement = run.judged(reference, corrupt)
    expected = Verdict.RECOVERED if is_it else Verdict.NOT_EXERCISED
    assert judgement.verdict is expected, judgement.reason


@pytest.mark.parametrize(
    ("event", "named", "is_it"),
    [
        ("delete", "/data/ckpt-4", True),
        ("delete", "'/data/ckpt-4'", True),
        ("delete", "ckpt-4", False),
        ("delete", "/data/ckpt-4/rank-0", False),
        ("delete", "/data/ckpt-40", False),
        ("delete", "/data", False),
        ("rename", "/data/ckpt-4", False),
    ],
)
def test_a_deletion_that_was_lost_is_told_of_by_who_cannot_delete_the_directory(
    reference: Evidence, run: Evidence, event: str, named: str, is_it: bool
) -> None:
    lose = f"lose rank=1 at=step:4/storage/{event}"
    run.strike(lose, fault=0, step=4, event=f"storage/{event}")
    facts = {"fault": 0, "event": f"storage/{event}", "file": "/data/ckpt-4/rank-1", "change": "x"}
    run.record(1, 1, "operation", **facts, changed=True)
    run.fail(rank=0, attempt=1, error="OSError", t=11.0, message=f"Directory not empty: {named}")
    run.attempt(range(1, 5), published=(2, 4), valid=(2, 4), **FAILED)
    finish(run)
    judgement = run.judged(reference, lose)
    expected = Verdict.RECOVERED if is_it else Verdict.UNRECOVERABLE
    assert judgement.verdict is expected, judgement.reason
