"""Faults of hosts as text, where they are refused, and what is taken for their effect."""

from __future__ import annotations

from pathlib import Path

import pytest
from evidence import Evidence, interrupt, outputs, state

from seatrial.chaos.errors import FaultSyntaxError, ImpossibleFaultError, UsageError
from seatrial.chaos.fault import Fault
from seatrial.chaos.launch.plan import World, network_file
from seatrial.chaos.network.available import require_hosts
from seatrial.chaos.network.evidence import cut_off, no_effect
from seatrial.chaos.schedule import Schedule, Shape, require_possible
from seatrial.chaos.trace import TraceWriter
from seatrial.chaos.verdict import Judgement, Verdict
from seatrial.plugins.options import ChaosOptions, override
from seatrial.plugins.preflight import bundled_trials

SHAPE = Shape(world_size=4, ranks_per_node=2, steps=14, checkpoint_interval=5, hosts=True)


@pytest.mark.parametrize(
    "text",
    [
        "partition node=1 at=step:7/backward",
        "partition node=1 at=step:7/backward way=out heal=2.5",
        "partition node=0 at=restore when=after persistent=yes way=in",
        "reset node=1 at=step:7/backward",
        "throttle node=1 at=step:7/backward rate=1000.0",
        "crash node=1 at=step:10/checkpoint/report nth=2",
    ],
)
def test_a_fault_of_a_host_prints_as_it_parses(text: str) -> None:
    fault = Fault.parse(text)
    assert Fault.parse(str(fault)) == fault
    assert fault.targets(world_size=4, ranks_per_node=2) in ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("partition rank=1 at=data", "partition strikes a whole host: say node=N"),
        ("reset rank=* at=data", "reset strikes a whole host: say node=N"),
        ("partition node=1 at=data way=up", "choose one of both, out, in"),
        ("partition node=1 at=data heal=0", "heal=0.0 should be a number above 0"),
        ("partition node=1 at=data heal=soon", "'heal=soon' should be a number of seconds"),
        ("crash node=1 at=data heal=1", "crash does not take heal=; it takes no option"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(text: str, words: str) -> None:
    with pytest.raises(FaultSyntaxError) as caught:
        Fault.parse(text)
    assert words in str(caught.value)


@pytest.mark.parametrize("action", ["partition", "throttle", "reset", "crash"])
def test_a_fault_of_a_host_is_refused_where_there_are_none(action: str) -> None:
    schedule = Schedule.parse(f"{action} node=1 at=step:7/backward")
    require_possible(schedule, SHAPE)
    one_host = Shape(world_size=4, ranks_per_node=2, steps=14, checkpoint_interval=5)
    with pytest.raises(ImpossibleFaultError, match="on one host; add --chaos-launcher hosts"):
        require_possible(schedule, one_host)


def test_the_pre_flight_on_hosts_has_every_fault_of_them() -> None:
    trials = bundled_trials(SHAPE, seed=0, extras=False)
    actions = {fault.action for trial in trials for fault in trial.schedule.faults}
    assert {"partition", "throttle", "reset", "crash"} <= actions


class Judged:
    """A run whose first attempt was struck on rank 1, and the second went on from step 4."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(
        self, fault: str, *seen: dict[str, object], ending: str = "hung", status: int | None = None
    ) -> Judgement:
        reference = Evidence(self._directory / "reference")
        reference.attempt(range(1, 7), published=(2, 4, 6), valid=(2, 4, 6))
        run = Evidence(self._directory / "run")
        run.strike(fault)
        trace = TraceWriter(network_file(run.directory, 1))
        for record in seen:
            trace.record(str(record["kind"]), **{k: v for k, v in record.items() if k != "kind"})
        exits = {} if status is None else {1: status}
        if ending == "completed":
            run.attempt(range(1, 7), published=(2, 4, 6), valid=(2, 4, 6))
        else:
            interrupt(run, ending=ending, exits=exits)
            run.attempt((5, 6), restored=4, source=1, published=(6,), valid=(2, 4, 6))
        return run.judged(reference, fault)


@pytest.fixture
def judged(tmp_path: Path) -> Judged:
    return Judged(tmp_path)


def seen(**facts: object) -> dict[str, object]:
    return {"kind": "network", "fault": 0, "host": 1} | facts


CUT, KEPT = seen(did="cut"), seen(did="kept", waiting=["a-b"])
QUIET, HEALED = seen(did="kept", waiting=[]), seen(did="heal")
PARTITION = "partition node=1 at=data"


@pytest.mark.parametrize(
    ("fault", "records", "ending", "status"),
    [
        (PARTITION, [CUT, KEPT], "hung", None),
        (PARTITION, [CUT, KEPT, HEALED], "completed", None),
        ("reset node=1 at=data", [seen(did="reset", gone=["a-b"])], "failed", 1),
        ("throttle node=1 at=data", [seen(did="held back", times=3)], "completed", None),
        ("crash node=1 at=data", [seen(did="crash", killed=["1 agent"])], "failed", -9),
    ],
)
def test_a_fault_whose_effect_the_switch_saw_was_exercised(
    judged: Judged, fault: str, records: list[dict[str, object]], ending: str, status: int | None
) -> None:
    judgement = judged(fault, *records, ending=ending, status=status)
    assert judgement.verdict is Verdict.RECOVERED, judgement.reason


@pytest.mark.parametrize(
    ("fault", "records", "ending", "status", "words"),
    [
        (PARTITION, [], "hung", None, "the switch between the hosts was not told of it"),
        (PARTITION, [CUT, QUIET], "hung", None, "nothing was sent over that link"),
        (PARTITION, [CUT, QUIET, HEALED], "completed", None, "nothing was sent over that link"),
        (PARTITION, [CUT, KEPT], "completed", None, "the attempt completed all the same"),
        (
            PARTITION,
            [CUT, KEPT, seen(failed="no tc")],
            "hung",
            None,
            "could not mend the link (no tc",
        ),
        (PARTITION, [KEPT | {"fault": 1}], "hung", None, "the switch between the hosts was not"),
        ("throttle node=1 at=data", [seen(did="held back", times=0)], "completed", None, "to wait"),
        ("reset node=1 at=data", [seen(did="reset", gone=[])], "failed", 1, "no connection"),
        ("reset node=1 at=data", [seen(did="reset", gone=["a-b"])], "completed", None, "completed"),
        ("crash node=1 at=data", [seen(did="crash", killed=["1 x"])], "failed", 1, "did not die"),
        ("crash node=1 at=data", [seen(did="crash", killed=[])], "failed", -9, "did not die"),
    ],
)
def test_a_fault_whose_effect_nobody_saw_was_not(
    judged: Judged,
    fault: str,
    records: list[dict[str, object]],
    ending: str,
    status: int | None,
    words: str,
) -> None:
    judgement = judged(fault, *records, ending=ending, status=status)
    assert judgement.verdict is Verdict.NOT_EXERCISED
    assert words in judgement.reason


@pytest.mark.parametrize(
    ("ranks", "healed_t", "verdict"),
    [
        ((0, 1), 13.1, Verdict.UNRECOVERABLE),
        ((1,), 13.1, Verdict.RECOVERED),  # the other may have waited in vain
        ((0, 1), 13.6, Verdict.RECOVERED),  # the last calls may have been made before the cut
        ((), 13.1, Verdict.RECOVERED),
    ],
)
def test_a_healed_partition_explains_no_failure_after_a_step_that_all_completed(
    tmp_path: Path, ranks: tuple[int, ...], healed_t: float, verdict: Verdict
) -> None:
    fault = f"{PARTITION} heal=3"
    reference, run = Evidence(tmp_path / "reference"), Evidence(tmp_path / "run")
    reference.attempt(range(1, 7), published=(2, 4, 6), valid=(2, 4, 6))
    run.strike(fault)
    trace = TraceWriter(network_file(run.directory, 1))
    for t, did, facts in (
        (10.1, "cut", {}),
        (13, "kept", {"waiting": ["a-b"]}),
        (healed_t, "heal", {}),
    ):
        trace.record("network", **facts | {"fault": 0, "host": 1, "did": did, "t": t})
    interrupt(run, exits={1: 1})
    for rank in ranks:
        finished = {"outputs": outputs(rank, 5), "fingerprint": state(rank, 5)}
        run.record(rank, 1, "step", step=5, t=13.5, **finished)
    run.attempt((5, 6), restored=4, source=1, published=(6,), valid=(2, 4, 6))
    assert run.judged(reference, fault).verdict is verdict


def test_a_slow_link_does_not_explain_a_failure(judged: Judged) -> None:
    held = seen(did="held back", times=3)
    judgement = judged("throttle node=1 at=data", held, ending="failed", status=1)
    assert judgement.verdict is Verdict.UNRECOVERABLE
    assert "though no fault struck" in judgement.reason


@pytest.mark.parametrize(("last", "went_on"), [(6, False), (7, True)])
def test_a_reset_after_which_the_job_goes_on_changed_nothing(
    tmp_path: Path, last: int, went_on: bool
) -> None:
    """In the step of the strike, and in the next, the last call may have been made before."""
    evidence = Evidence(tmp_path)
    evidence.strike("reset node=1 at=data", step=5)
    TraceWriter(network_file(tmp_path, 1)).record("network", fault=0, did="reset", gone=["a-b"])
    evidence.attempt((), ending="failed", exits={0: 1, 1: 1})
    evidence.record(0, 1, "step", step=last, t=11.0)
    (strike,) = evidence.run.strikes()
    said = no_effect(evidence.run, Fault.parse("reset node=1 at=data"), strike)
    assert said == ("the job went on all the same" if went_on else "")


def test_a_host_that_was_cut_off_is_named_with_its_ranks() -> None:
    world = World(ranks=4, nodes=2, topology="dp4")
    link = {"kind": "link", "host": 1, "way": "in", "waiting": ["a-b", "a-c"]}
    assert cut_off([CUT, link], world) == (
        "host 1 (ranks 2, 3) heard nobody: what was sent to it was lost; 2 connections wait for it"
    )
    assert cut_off([CUT, KEPT, HEALED], world) == ""


@pytest.mark.usefixtures("available")
def test_hosts_that_cannot_be_made_are_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageError, match=r"joins 2 to 99 hosts: .*, which is 100"):
        require_hosts(100)
    monkeypatch.setattr("seatrial.chaos.network.available._PROGRAMS", {"no-such-ip": "iproute9"})
    with pytest.raises(UsageError, match=r"hosts needs no-such-ip \(iproute9 on Debian\)"):
        require_hosts(2)
    monkeypatch.setattr("seatrial.chaos.network.available._PROGRAMS", {})
    monkeypatch.setattr("seatrial.chaos.network.available._TRIAL", "ip link add x type no-such")
    with pytest.raises(
        UsageError, match=r"which this machine does not give: .*Unknown device type"
    ):
        require_hosts(2)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="needs root"):
        require_hosts(2)


@pytest.mark.usefixtures("available")
def test_hosts_need_a_store_that_they_reach() -> None:
    with pytest.raises(UsageError, match="must be a directory, and not 's3://bucket/x'"):
        override(
            ChaosOptions(store="s3://bucket/x"), {"launcher": "hosts", "nodes": 2}, beside=Path()
        )
