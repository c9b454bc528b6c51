"""What a verdict makes of what a disk saw: who was told, who read, and what was not observed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_evidence import CORRUPT, FILE, KILL, DiskEvidence
from evidence import Evidence, finish, interrupt

from seatrial.chaos.errors import UsageError
from seatrial.chaos.own_checkpoints import state_of
from seatrial.chaos.powerloss import check_kind
from seatrial.chaos.verdict import Verdict

MakeRun = Callable[..., DiskEvidence]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """A run that was killed in step 5, after a write of step 4 was corrupted; then it restored."""

    def make(
        *, restored: int = 4, wrong: str = "", is_read: bool = True, error: str = ""
    ) -> DiskEvidence:
        run = DiskEvidence(tmp_path / "run")
        run.strike(CORRUPT, fault=0, step=4, event="storage/write", t=8.0)
        run.strike(KILL, fault=1)
        facts = {"fault": 0, "event": "storage/write", "file": FILE, "change": "bit 0 flipped"}
        run.saw(1, 1, "operation", t=8.0, **facts, changed=True)
        run.saw(1, 1, "damage", t=8.0, **facts, step=4)
        interrupt(run, valid=(2,), cause="x")
        run.is_the_jobs()
        if is_read:
            run.saw(1, 2, "met", fault=0, file=FILE, step=4)
        if error:
            run.attempt((), ending="failed", exits={0: 1, 1: 1}, silent=(0, 1), valid=(2,))
            run.fail(rank=1, attempt=2, error=error, t=19.0)
            run.is_the_jobs()
            return run
        # Everything after a wrong beginning is wrong as well.
        run.attempt(
            range(restored + 1, 7),
            restored=restored,
            source=1,
            published=(6,),
            valid=(4, 6),
            wrong_at_start=wrong,
            wrong={1: wrong} if wrong else None,
        )
        run.is_the_jobs()
        return run

    return make


SCHEDULE = f"{CORRUPT}; {KILL}"


@pytest.mark.parametrize(
    ("run", "verdict", "says"),
    [
        ({"wrong": "model"}, Verdict.CORRUPTION_UNDETECTED, FILE),
        ({}, Verdict.NOT_EXERCISED, "the state is right all the same"),
        ({"restored": 2}, Verdict.RECOVERED, ""),
        ({"is_read": False}, Verdict.NOT_EXERCISED, "neither did a restore meet"),
        ({"is_read": False, "wrong": "model"}, Verdict.NOT_EXERCISED, "neither did"),
        ({"error": "UnpicklingError"}, Verdict.UNRECOVERABLE, "no valid checkpoint is left"),
        ({"error": "UnpicklingError", "is_read": False}, Verdict.NOT_EXERCISED, "neither did"),
    ],
)
def test_what_was_changed_at_rest_is_judged_by_who_read_it_and_by_the_state(
    reference: Evidence, make_run: MakeRun, run: dict[str, object], verdict: Verdict, says: str
) -> None:
    judgement = make_run(**run).judged(reference, SCHEDULE)
    assert judgement.verdict is verdict, judgement.reason
    assert says in judgement.reason


REFUSED = "fail rank=1 at=storage/read attempt=2"


@pytest.mark.parametrize("told", [True, False])
def test_a_reading_that_failed_proves_something_only_if_the_program_was_told(
    reference: Evidence, tmp_path: Path, told: bool
) -> None:
    run = DiskEvidence(tmp_path / "run")
    run.strike(KILL, fault=0)
    interrupt(run)
    run.strike(REFUSED, fault=1, attempt=2, event="storage/read", t=17.0)
    facts = {"fault": 1, "event": "storage/read", "file": FILE, "change": "EIO"}
    run.saw(1, 2, "operation", t=17.0, **facts, changed=True)
    if told:
        run.saw(1, 2, "told", t=17.5, file=FILE)
    finish(run)
    judgement = run.judged(reference, f"{KILL}; {REFUSED}")
    assert (judgement.verdict is Verdict.RECOVERED) == told, judgement.reason
    assert told or "only of what the kernel read ahead" in judgement.reason


@pytest.mark.parametrize(
    ("kind", "facts", "says"),
    [
        ("elsewhere", {"file": "/data/a"}, "rank 1 wrote /data/a, where no fault"),
        ("stranger", {"pid": 7, "command": "x", "file": "/disk/b"}, "a process of no rank, 7 (x)"),
        ("unread", {"file": "/disk/c"}, "nothing of it was fetched for that rank"),
        ("disk", {"root": "/disk", "watched": False}, "native code wrote beside the disk is not"),
    ],
)
def test_what_was_not_observed_is_the_reason_of_a_fault_that_never_fired(
    reference: Evidence, tmp_path: Path, kind: str, facts: dict[str, object], says: str
) -> None:
    run = DiskEvidence(tmp_path / "run")
    run.saw(1, 1, "disk", root="/disk", watched=True)
    run.saw(1, 1, kind, **facts)
    run.attempt(range(1, 7), published=(2, 4, 6), valid=(4, 6))
    judgement = run.judged(reference, "fail rank=1 at=storage/read")
    assert judgement.verdict is Verdict.NOT_EXERCISED
    assert says in judgement.reason
    assert kind == "unread" or any(says in note for note in judgement.notes)


def test_a_job_s_own_checkpoint_is_valid_if_it_was_acknowledged_and_not_changed_since(
    tmp_path: Path,
) -> None:
    run = DiskEvidence(tmp_path / "run")
    assert state_of(run.directory) is None
    for step in (2, 4):
        run.record(1, 1, "published", step=step)
    assert state_of(run.directory) is None
    run.record(0, 1, "stores", by="job")
    assert state_of(run.directory).valid == (2, 4)  # type: ignore[union-attr]
    run.saw(1, 1, "damage", step=4, event="storage/write", file=FILE, change="x", fault=0)
    run.saw(1, 1, "damage", step=2, event="storage/read", file=FILE, change="x", fault=0)
    assert state_of(run.directory).valid == (2,)  # type: ignore[union-attr]
    run.record(1, 2, "published", step=4)
    assert state_of(run.directory).valid == (2, 4)  # type: ignore[union-attr]


@pytest.mark.parametrize("missing", ["mfusepy", "libfuse", "/dev/fuse", "fusermount3"])
def test_a_machine_that_cannot_have_such_a_disk_is_told_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    there = {"mfusepy": object(), "libfuse": "lib", "/dev/fuse": True, "fusermount3": "/bin/x"}
    there[missing] = None
    module = "seatrial.chaos.powerloss.disk"
    monkeypatch.setattr("importlib.util.find_spec", lambda _: there["mfusepy"])
    monkeypatch.setattr("ctypes.util.find_library", lambda _: there["libfuse"])
    monkeypatch.setattr(f"{module}.os.path.exists", lambda _: bool(there["/dev/fuse"]))
    monkeypatch.setattr(f"{module}.os.geteuid", lambda: 1000)
    monkeypatch.setattr(f"{module}.shutil.which", lambda _: there["fusermount3"])
    with pytest.raises(UsageError, match=rf"--chaos-disk fuse needs .*{missing}"):
        check_kind("fuse", "--chaos-disk")


@pytest.mark.parametrize("resume", ["", " resume=2"])
@pytest.mark.parametrize(
    ("kind", "is_stopped"), [("elsewhere", True), ("met", True), ("event", False)]
)
def test_what_the_kernel_does_for_a_stopped_rank_does_not_show_that_it_ran(
    reference: Evidence, tmp_path: Path, kind: str, is_stopped: bool, resume: str
) -> None:
    stop = f"stop rank=1 at=step:4/storage/write{resume}"
    run = DiskEvidence(tmp_path / "run")
    run.strike(stop, fault=0, step=4, event="storage/write", t=10.0)
    # Its trace goes on when it has been continued.
    for t in (10.8, 11.6, 12.4) if resume else (12.0,):
        run.saw(1, 1, kind, t=t, file=FILE, event="storage/read", edge="before")
    attempt: dict[str, object] = {"published": (2,), "valid": (2,)}
    if resume:
        run.record(1, 1, "event", t=13.5, event="data", edge="before")
        attempt = {"published": (2, 4, 6), "valid": (4, 6)}
    else:
        attempt |= {"ending": "hung", "exits": {0: 1}, "cause": "hung"}
    run.attempt(range(1, 7 if resume else 5), **attempt)
    if not resume:
        run.attempt(range(3, 7), restored=2, source=1, published=(4, 6), valid=(4, 6))
    judgement = run.judged(reference, stop)
    expected = Verdict.RECOVERED if is_stopped else Verdict.NOT_EXERCISED
    assert judgement.verdict is expected, judgement.reason


FAIL = "fail rank=1 at=step:4/storage/write error=EIO"


@pytest.mark.parametrize(
    ("overcome", "status", "event", "verdict"),
    [
        ("", 1, "write", Verdict.RECOVERED),
        (FILE, 1, "write", Verdict.UNRECOVERABLE),
        ("/disk/store/ckpt-4/other", 1, "write", Verdict.RECOVERED),
        ("", -signal.SIGBUS, "read", Verdict.RECOVERED),
        ("", -signal.SIGBUS, "write", Verdict.UNRECOVERABLE),
    ],
)
def test_a_refusal_that_was_tried_again_explains_nothing_nor_does_one_explain_any_signal(
    reference: Evidence, tmp_path: Path, overcome: str, status: int, event: str, verdict: Verdict
) -> None:
    fault = FAIL.replace("write", event)
    run = DiskEvidence(tmp_path / "run")
    run.strike(fault, fault=0, step=4, event=f"storage/{event}", t=10.0)
    facts = {"fault": 0, "event": f"storage/{event}", "file": FILE, "change": "EIO"}
    run.saw(1, 1, "operation", t=10.0, **facts, changed=True)
    if overcome:
        run.saw(1, 1, "overcome", t=10.1, event="storage/write", file=overcome)
    if status == 1:
        causes = ["OSError"] if overcome == FILE else []
        bug = {"error": "KeyError", "causes": causes, "message": "an unrelated bug"}
        run.fail(rank=1, attempt=1, t=12.0, **bug)  # type: ignore[arg-type]
    interrupt(run, exits={0: 1, 1: status}, published=(2,), valid=(2,))
    run.attempt(range(3, 7), restored=2, source=1, published=(4, 6), valid=(4, 6))
    judgement = run.judged(reference, fault)
    assert judgement.verdict is verdict, judgement.reason
