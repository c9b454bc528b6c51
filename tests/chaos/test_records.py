"""Verifies faults of the data: a shard that is slow, and records whose bytes are wrong, once or for
good, that a job refuses, skips, or does not notice.

The job's records have digests (`seatrial.plugins.jobs.records`); one that checks nothing cannot
notice, and is told so only where the wrong bytes reach its state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from small_trials import experiment_of

from seatrial.chaos.errors import FaultSyntaxError
from seatrial.chaos.schedule import Schedule
from seatrial.chaos.session import Session, Trial
from seatrial.chaos.verdict import Verdict
from seatrial.plugins.jobs.records import RecordFile, index_of, write_records
from seatrial.recovery.errors import DamagedRecordError
from seatrial.recovery.probe import listen
from seatrial.recovery.sampler import ShuffleSampler

RECORDS = [bytes([number, 7, 5, 3]) for number in range(12)]
ORDER = ShuffleSampler(num_samples=12, seed=0, batch_size=4)
THIRD = [ORDER.next_batch()[1].tolist() for _ in range(3)][2][0]
"""A record of step 3, right after a checkpoint, and of one step in every other epoch."""
LASTING = f"spoil rank=* at=data/record persistent=yes record={THIRD}"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "records"
    write_records(path, RECORDS)
    return path


@pytest.fixture
def try_data(session: Session, data: Path) -> Callable[..., Trial]:
    """``try_data("spoil …", damaged="skip")``: two ranks, an epoch of 3 steps, 8 steps."""

    def run(schedule: str, max_restarts: int = 3, **params: object) -> Trial:
        experiment = experiment_of("records_job:RecordsJob", {"path": str(data), **params})
        subject = replace(experiment, max_restarts=max_restarts)
        return session.trial(subject, Schedule.parse(schedule))

    return run


def test_a_slow_shard_of_data_changes_nothing(try_data: Callable[..., Trial]) -> None:
    trial = try_data("delay rank=1 at=step:5/data/record seconds=0.3")
    assert (trial.verdict, trial.judgement.attempts) == (Verdict.RECOVERED, 1)
    assert [(each.action, each.rank) for each in trial.run.strikes()] == [("delay", 1)]


def test_a_delay_leaves_a_record_when_it_is_over(try_data: Callable[..., Trial]) -> None:
    trial = try_data("delay rank=1 at=step:5/data/record seconds=0.3")
    records = [each for each in trial.run.trace(1, 1) if each["kind"] == "delayed"]
    assert [(each["fault"], each["seconds"]) for each in records] == [(0, 0.3)]


def test_a_record_that_is_wrong_once_is_refused_and_read_again(
    try_data: Callable[..., Trial],
) -> None:
    trial = try_data("spoil rank=1 at=step:5/data/record")
    assert trial.verdict is Verdict.RECOVERED, trial.reason
    assert "DamagedRecordError: record " in trial.run.attempts[0].cause


def test_a_record_that_is_wrong_for_good_stops_the_job_with_its_checkpoint(
    try_data: Callable[..., Trial],
) -> None:
    trial = try_data(LASTING, max_restarts=1)
    assert trial.verdict is Verdict.STOPPED, trial.reason
    assert f"DamagedRecordError: record {THIRD} of" in trial.reason
    assert "the checkpoint of step 2 is valid" in trial.reason


def test_a_record_that_is_skipped_is_skipped_again_after_a_restart(
    try_data: Callable[..., Trial],
) -> None:
    trial = try_data(f"{LASTING}; kill rank=1 at=step:7/data", damaged="skip")
    assert trial.verdict is Verdict.RECOVERED, trial.reason
    skipped = [
        (record["step"], record["outputs"]["skipped"])  # type: ignore[index]
        for _, _, trace in trial.run.traces()
        for record in trace
        if record["kind"] == "step" and record["outputs"]["skipped"]  # type: ignore[index]
    ]
    assert len({step for step, _ in skipped}) == 3  # one in every epoch
    assert all(records == [THIRD] for _, records in skipped)


@pytest.mark.parametrize(
    ("schedule", "params", "verdict", "says"),
    [
        (
            f"{LASTING}; kill rank=1 at=step:4/data",
            {"damaged": "skip", "bug": "trusts a restart"},
            Verdict.CORRUPTION_UNDETECTED,
            f"read record {THIRD} with a bit flipped, and neither refused nor skipped it",
        ),
        (
            "spoil rank=1 at=step:5/data/record",
            {"bug": "trusts all"},
            Verdict.CORRUPTION_UNDETECTED,
            "attempt 1, step 5: rank 1 read record",
        ),
        (
            "spoil rank=1 at=step:5/data/record",
            {"damaged": "skip", "bug": "says nothing"},
            Verdict.CORRUPTION_UNDETECTED,
            "neither refused nor skipped it",
        ),
        # Skipped though the next reading would have been right: a sample is lost.
        (
            "spoil rank=1 at=step:5/data/record",
            {"damaged": "skip"},
            Verdict.DIVERGED,
            "attempt 1, step 5: the samples of rank 1 differ",
        ),
        ("spoil rank=1 at=data/record record=99", {}, Verdict.NOT_EXERCISED, "never fired"),
    ],
)
def test_a_job_that_loses_or_uses_wrong_data_never_passes(
    try_data: Callable[..., Trial],
    schedule: str,
    params: dict[str, object],
    verdict: Verdict,
    says: str,
) -> None:
    trial = try_data(schedule, **params)
    assert trial.verdict is verdict, trial.reason
    assert says in trial.reason


@pytest.mark.parametrize(
    "fault", ["spoil rank=1 at=data", "spoil rank=1 at=data/record when=after", "spoil rank=1 at=*"]
)
def test_only_a_record_in_hand_can_be_spoilt(fault: str) -> None:
    with pytest.raises(FaultSyntaxError, match="spoil strikes before at=data/record"):
        Schedule.parse(fault)


@pytest.fixture
def damaged_file(tmp_path: Path) -> Path:
    """Record 1 has a byte that was changed, and record 3 is cut off."""
    path = tmp_path / "records"
    write_records(path, [b"zero", b"one", b"", b"three"])
    path.write_bytes(path.read_bytes().replace(b"one", b"0ne")[:-1])
    return path


def test_records_come_back_and_wrong_ones_do_not(damaged_file: Path) -> None:
    skipping = RecordFile(damaged_file, damaged="skip")
    assert [skipping.read(number) for number in range(4)] == [b"zero", None, b"", None]
    stopping = RecordFile(damaged_file)
    assert stopping.read(0) == b"zero"
    with pytest.raises(DamagedRecordError, match=r"record 1 of .* \(bytes 4 to 7\) does not have"):
        stopping.read(1)
    with pytest.raises(DamagedRecordError, match="record 3 of"):
        stopping.read(3)
    with pytest.raises(IndexError, match="has 4 records, and no record 4"):
        stopping.read(4)
    skipping.close()
    stopping.close()


def test_every_read_is_announced_with_the_bytes_in_hand(damaged_file: Path) -> None:
    seen: list[tuple[str, str, object]] = []
    stop = listen(lambda event, edge, facts: seen.append((event, edge, facts.get("data"))))
    records = RecordFile(damaged_file)
    records.read(0)
    stop()
    records.close()
    assert seen == [("data/record", "before", b"zero"), ("data/record", "after", None)]


@pytest.mark.parametrize("content", [None, "", "{}", '{"ends": [1], "digests": []}'])
def test_an_index_that_cannot_be_read_is_refused(damaged_file: Path, content: str | None) -> None:
    index = index_of(damaged_file)
    index.unlink() if content is None else index.write_text(content)
    with pytest.raises(DamagedRecordError, match=r"cannot be read: .*; write them again"):
        RecordFile(damaged_file)


def test_another_policy_is_refused(damaged_file: Path) -> None:
    with pytest.raises(ValueError, match="damaged='ignore': choose one of stop, skip"):
        RecordFile(damaged_file, damaged="ignore")
