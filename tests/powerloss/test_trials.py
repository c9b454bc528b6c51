"""Whole trials on a disk that loses power: a store that keeps what it acknowledged recovers, one
that does not is TORN, and a cut that cannot be made is never a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from small_trials import experiment_of

from seatrial.chaos.errors import FaultSyntaxError, ImpossibleFaultError, UsageError
from seatrial.chaos.experiment import Experiment
from seatrial.chaos.fault import Fault
from seatrial.chaos.powerloss import check_kind
from seatrial.chaos.powerloss.volatile import SURVIVES
from seatrial.chaos.schedule import Schedule, require_possible
from seatrial.chaos.session import Session, Trial
from seatrial.chaos.verdict import Verdict

OpenSession = Callable[[str], Session]


def experiment(kind: str = "fuse", bug: str = "") -> Experiment:
    """Six steps of the tiny job, a checkpoint after every second one."""
    return replace(experiment_of("tiny_job:TinyJob", {"bug": bug}, steps=6), powerloss=kind)


@pytest.fixture(scope="module")
def open_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenSession]:
    """``open_session("fuse")``: the one on that kind of disk; none for an empty one."""
    opened: dict[str, Session] = {}

    def make(kind: str) -> Session:
        if kind not in opened:
            if kind:
                try:
                    check_kind(kind)
                except UsageError as error:
                    pytest.skip(str(error))
            root = tmp_path_factory.mktemp("session")
            opened[kind] = Session(root, owner="test", powerloss=kind)
        return opened[kind]

    yield make
    for session in opened.values():
        session.close()


def try_job(session: Session, schedule: str, kind: str = "fuse", bug: str = "") -> Trial:
    return session.trial(experiment(kind, bug), Schedule.parse(schedule))


@pytest.mark.parametrize("survives", SURVIVES)
def test_the_store_keeps_what_it_acknowledged(open_session: OpenSession, survives: str) -> None:
    schedule = f"powercut rank=* at=step:4/checkpoint/shard/fsync survives={survives}"
    trial = try_job(open_session("fuse"), schedule)
    assert (trial.verdict, trial.steps_lost) == (Verdict.RECOVERED, 2), trial.reason
    lost = trial.run.attempts[0].store.lost
    assert lost is not None
    assert (lost == ()) == (survives == "all")
    assert trial.run.attempts[1].store.lost is None


def test_power_may_be_lost_at_an_operation_that_the_disk_itself_sees(
    open_session: OpenSession,
) -> None:
    trial = try_job(open_session("fuse"), "powercut rank=* at=step:4/storage/sync nth=2")
    assert (trial.verdict, trial.steps_lost) == (Verdict.RECOVERED, 2), trial.reason
    assert trial.run.attempts[0].store.lost == ("step-00000004 is gone",)


@pytest.mark.parametrize("kind", ["fuse", "ext4"])
def test_power_may_be_lost_twice(open_session: OpenSession, kind: str) -> None:
    cut = "powercut rank=* at=step:4/checkpoint/manifest/fsync"
    trial = try_job(open_session(kind), f"{cut}; {cut} attempt=2", kind)
    assert (trial.verdict, trial.judgement.attempts) == (Verdict.RECOVERED, 3), trial.reason
    assert [each.store.lost is None for each in trial.run.attempts] == [False, False, True]


@pytest.mark.parametrize("kind", ["fuse", "xfs"])
def test_a_store_that_syncs_nothing_is_torn(open_session: OpenSession, kind: str) -> None:
    trial = try_job(
        open_session(kind), "powercut rank=* at=step:5/backward", kind, bug="never syncs"
    )
    assert trial.verdict is Verdict.TORN
    assert "acknowledged the checkpoint of step 4" in trial.reason
    assert "after the power loss step-0000000" in trial.reason


def test_without_a_power_loss_the_same_store_passes(open_session: OpenSession) -> None:
    """So the cut is what finds it, and a kill is not."""
    trial = try_job(open_session("fuse"), "kill rank=* at=step:5/backward", bug="never syncs")
    assert trial.verdict is Verdict.RECOVERED


def test_a_cut_that_no_disk_felt_proves_nothing(open_session: OpenSession) -> None:
    trial = try_job(open_session(""), "powercut rank=* at=step:5/backward")
    assert trial.verdict is Verdict.NOT_EXERCISED
    assert "changed nothing" in trial.reason


def test_a_cut_is_refused_where_it_cannot_be_made() -> None:
    cut = Schedule.parse("powercut rank=* at=step:4/checkpoint survives=half")
    with pytest.raises(ImpossibleFaultError, match="add --chaos-powerloss fuse"):
        require_possible(cut, experiment("").shape)
    with pytest.raises(ImpossibleFaultError, match="ext4 decides for itself what survives"):
        require_possible(cut, experiment("ext4").shape)
    require_possible(cut, experiment("fuse").shape)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("powercut rank=1 at=data", "a whole machine: say rank="),
        ("powercut rank=* at=data survives=most", "certain, names, half, all"),
        ("kill rank=* at=data survives=half", "does not take survives="),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(text: str, words: str) -> None:
    with pytest.raises(FaultSyntaxError, match=words):
        Fault.parse(text)


def test_a_reference_is_the_same_on_every_disk() -> None:
    assert experiment("fuse").key == experiment("").key == replace(experiment("xfs")).key
