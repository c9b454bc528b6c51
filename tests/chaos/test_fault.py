"""One fault as a value and as one line of text; which ranks it names, which events it counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.chaos.actions import ACTIONS, BENDING, ERRORS, NETWORK, PARTS
from seatrial.chaos.errors import FaultSyntaxError
from seatrial.chaos.events import EVENTS, RECORD, At
from seatrial.chaos.fault import Fault
from seatrial.chaos.powerloss.volatile import SURVIVES

_NAMES = [event.name for event in EVENTS]
_PATTERNS = [
    "*",
    "checkpoint/*",
    "checkpoint/manifest/*",
    "restore/*",
    "*/fsync",
    "st[ae]*",
    "collective/*",
]
_SECONDS = st.floats(min_value=0, allow_nan=False, allow_infinity=False)

_STEPS = st.none() | st.integers(0, 10**6)
ats = st.builds(At, st.sampled_from(_NAMES + _PATTERNS), _STEPS)
_PATHS = st.text("abz/*?[]-_.=", min_size=1)


_ABOVE_0 = _SECONDS.filter(bool)
_COUNTS = st.integers(1, 10**6)


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    """Any valid fault."""
    action = draw(st.sampled_from(sorted(ACTIONS)))
    at = draw(ats)
    able = [f"storage/{name}" for name in ACTIONS[action].operations]
    if able and (action != "delay" or draw(st.booleans())):
        at = At(draw(st.sampled_from([*able, "storage/*"])), at.step)
    if action == "spoil":
        at = At(RECORD, at.step)
    options: dict[str, st.SearchStrategy[Any]] = {
        "code": st.integers(1, 255),
        "grace": _SECONDS,
        "resume": st.none() | _SECONDS,
        "part": st.sampled_from(("shard", "objects") if action == "swap" else PARTS),
        "survives": st.sampled_from(SURVIVES),
        "record": st.none() | st.integers(0, 10**6),
        "times": st.integers(0, 10**6) if at.is_storage else st.just(1),
        "error": st.sampled_from(sorted(ERRORS)),
        "keep": st.none() | st.integers(0, 10**6),
        "hold": _COUNTS,
        "seconds": _ABOVE_0,
        "tail": st.none() | _ABOVE_0,
        "rate": _ABOVE_0,
        "across": st.booleans(),
        "size": st.sampled_from(["same", "other"]),
        "of": st.sampled_from(["result", "input"]),
        "to": st.sampled_from(["bit", "nan", "inf"]),
        "way": st.sampled_from(["both", "out", "in"]),
        "heal": st.none() | _ABOVE_0,
    }
    own = {name: draw(options[name]) for name in ACTIONS[action].options}
    number = st.integers(0, 4096)
    whom = [st.fixed_dictionaries({"node": number})]
    if action not in NETWORK:
        whom.append(st.just({"everyone": True}))
    if action not in ("powercut", *NETWORK):
        whom.append(st.fixed_dictionaries({"rank": number}))
    groups = st.none() | st.sampled_from(["mesh_tp", "default_pg", "*", "mesh_[dp]p"])
    has_group = action in BENDING or at.name.startswith("collective/")
    alters = bool(able) and at.is_storage and action != "fail"
    only_before = alters or action in (*BENDING, "spoil")
    return Fault(
        action=action,
        at=at,
        path=draw(_PATHS) if at.is_storage else "*",
        group=draw(groups) if has_group else None,
        nth=draw(_COUNTS),
        when="before" if only_before else draw(st.sampled_from(["before", "after"])),
        attempt=draw(st.none() | st.integers(1, 100)),
        persistent=draw(st.booleans()),
        **draw(st.one_of(whom)),
        **own,
    )


@given(faults())
def test_what_a_fault_prints_parses_back_to_it(fault: Fault) -> None:
    assert Fault.parse(str(fault)) == fault


@given(faults())
def test_a_fault_prints_as_one_line_without_a_separator(fault: Fault) -> None:
    assert "\n" not in str(fault)
    assert ";" not in str(fault)


@given(faults())
def test_a_label_is_one_word(fault: Fault) -> None:
    assert fault.label
    assert not set(fault.label) & set(" :/*=;")


@given(ats)
def test_what_an_event_selector_prints_parses_back_to_it(at: At) -> None:
    assert At.parse(str(at)) == at


def test_the_order_of_the_words_does_not_matter() -> None:
    one = Fault.parse("kill rank=1 at=step:12/backward nth=2 when=after")
    assert Fault.parse("kill when=after nth=2 at=step:12/backward rank=1") == one


def test_seconds_may_have_a_unit() -> None:
    assert Fault.parse("stop rank=1 at=data resume=0.5s").resume == 0.5


@pytest.mark.parametrize(
    ("text", "word", "valid"),
    [
        ("explode rank=1 at=data", "explode", "kill, stop, terminate"),
        ("kill rank=1 at=backwards", "backwards", "forward, backward, optimizer"),
        ("kill rank=1 at=step:x/data", "step:x/data", "forward, backward, optimizer"),
        ("kill rank=one at=data", "rank=one", "a whole number"),
        ("kill rank=-1 at=data", "rank=-1", "a whole number"),
        ("kill node=* at=data", "node=*", "a whole number"),
        ("kill at=data", "whom", "rank=N, rank=* or node=N"),
        ("kill rank=1 node=0 at=data", "whom", "rank=N, rank=* or node=N"),
        ("kill rank=1", "where", "at=step:12/backward"),
        ("kill rank=1 at=data at=step", "at=", "twice"),
        ("kill rank=1 at=data now", "now", "rank, node, at, nth"),
        ("kill rank=1 at=data speed=3", "speed=3", "rank, node, at, nth"),
        ("kill rank=1 at=data when=during", "when=during", "'before' or 'after'"),
        ("kill rank=1 at=data nth=0", "nth=", "from 1"),
        ("kill rank=1 at=data nth=first", "nth=first", "a whole number"),
        ("kill rank=1 at=data attempt=0", "attempt=", "from 1"),
        ("kill rank=1 at=data persistent=true", "persistent=true", "'yes' or 'no'"),
        ("kill rank=1 at=data code=3", "code=", "no option of its own"),
        ("stop rank=1 at=data grace=3", "grace=", "it takes resume"),
        ("exit rank=1 at=data code=0", "code=0", "1 to 255"),
        ("exit rank=1 at=data code=256", "code=256", "1 to 255"),
        ("stop rank=1 at=data resume=soon", "resume=soon", "a number of seconds"),
        ("stop rank=1 at=data resume=-1", "resume=-1", "a number of seconds"),
        ("terminate rank=1 at=data grace=nan", "grace=nan", "a number of seconds"),
        ("tear rank=1 at=data part=lid", "part='lid'", "shard, objects, manifest"),
        ("swap rank=1 at=data part=manifest", "swap", "one file for all"),
        ("fail rank=1 at=data", "data", "storage/create, storage/write"),
        ("lose rank=1 at=storage/read", "storage/read", "alters storage/write"),
        ("lose rank=1 at=storage/write when=after", "when=", "leave out when="),
        ("fail rank=1 at=storage/read error=EBADF", "error='EBADF'", "EIO, ENOSPC, EDQUOT"),
        ("fail rank=1 at=storage/read times=0", "times=0", "from 1, or 'always'"),
        ("fail rank=1 at=storage/read keep=1", "keep=", "it takes error, times"),
        ("kill rank=1 at=data path=*x", "path=*x", "at=storage/"),
        ("kill rank=1 at=storage/read path=", "path=", "a pattern"),
        ("delay rank=1 at=data times=3", "times=", "at=storage/"),
        ("delay rank=1 at=data seconds=0", "seconds=0", "above 0"),
        ("slow rank=1 at=storage/read rate=0", "rate=0", "above 0"),
        ("late rank=1 at=storage/write hold=0", "hold=", "count from 1"),
    ],
)
def test_a_wrong_word_is_named_together_with_what_may_stand_there(
    text: str, word: str, valid: str
) -> None:
    with pytest.raises(FaultSyntaxError) as caught:
        Fault.parse(text)
    message = str(caught.value)
    assert repr(text) in message
    assert word in message.replace(repr(text), "")
    assert valid in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": -1},
        {"node": -1},
        {"rank": 1, "action": "terminate", "grace": -1.0},
        {"rank": 1, "action": "terminate", "grace": math.nan},
        {"rank": 1, "action": "stop", "resume": math.inf},
        {"rank": 1, "when": "during"},
    ],
)
def test_a_value_that_could_not_be_parsed_cannot_be_made_either(wrong: dict[str, Any]) -> None:
    with pytest.raises(FaultSyntaxError):
        Fault(**dict[str, Any](action="kill", at=At("data")) | wrong)


@pytest.mark.parametrize(
    ("name", "step"), [("backwards", None), ("data", -1), ("[d ]ata", None), ("[d;]ata", None)]
)
def test_a_selector_that_could_not_be_parsed_cannot_be_made_either(
    name: str, step: int | None
) -> None:
    with pytest.raises(FaultSyntaxError, match="the events are start, exit, step"):
        At(name, step)


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("kill rank=3 at=data", (3,)),
        ("kill rank=4 at=data", ()),
        ("kill rank=* at=data", (0, 1, 2, 3)),
        ("kill node=1 at=data", (2, 3)),
        ("kill node=2 at=data", ()),
    ],
)
def test_a_fault_strikes_the_ranks_that_it_names(text: str, targets: tuple[int, ...]) -> None:
    assert Fault.parse(text).targets(world_size=4, ranks_per_node=2) == targets


@pytest.mark.parametrize(
    ("pattern", "event", "step", "matches"),
    [
        ("backward", "backward", None, True),
        ("backward", "backward", 7, True),
        ("backward", "forward", 7, False),
        ("step:7/backward", "backward", 7, True),
        ("step:7/backward", "backward", 8, False),
        ("step:7/backward", "backward", None, False),
        ("step:7", "step", 7, True),
        ("step:7", "backward", 7, False),
        ("step:7/checkpoint/*", "checkpoint/manifest/link", 7, True),
        ("step:7/checkpoint/*", "checkpoint", 7, False),
        ("checkpoint*", "checkpoint", 7, True),
        ("*", "exit", None, True),
        ("*", "storage/write", None, False),
        ("storage/*", "storage/write", None, True),
        ("step:4/storage/*", "storage/write", 4, True),
        ("storage/write", "storage/read", None, False),
        ("*", "collective/send", None, False),
        ("collective/*", "collective/send", None, True),
    ],
)
def test_a_selector_matches_names_and_steps(
    pattern: str, event: str, step: int | None, matches: bool
) -> None:
    assert At.parse(pattern).matches(event, step) is matches


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("kill rank=1 at=step:12/backward", "rank1-step12-backward"),
        ("kill rank=* at=step:12", "all-step12"),
        ("kill node=0 at=checkpoint/* nth=3", "node0-checkpoint-any-nth3"),
        ("kill rank=0 at=restore attempt=2 when=after", "rank0-restore-after-attempt2"),
        ("stop rank=1 at=data resume=0.3 persistent=yes", "rank1-data-persistent-resume0.3"),
        ("flip rank=1 at=data part=manifest", "rank1-data-manifest"),
        (
            "fail rank=1 at=storage/write error=ENOSPC path=*/rank-00001* times=always",
            "rank1-storage-write-rank-00001-timesalways-ENOSPC",
        ),
        ("short rank=0 at=storage/commit keep=10", "rank0-storage-commit-keep10"),
    ],
)
def test_a_label_reads_like_the_fault(text: str, label: str) -> None:
    assert Fault.parse(text).label == label


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("reorder rank=1 at=backward when=after", "strikes before it"),
        ("kill rank=1 at=backward group=mesh_tp", "group= is of collectives"),
        ("kill rank=1 at=collective/* group=", "has no name"),
        ("garble rank=1 at=collective/* to=zero", "choose one of bit, nan, inf"),
        ("wrong-dtype rank=1 at=collective/* size=half", "choose one of same, other"),
        ("delay rank=1 at=collective/* tail=0", "a number above 0"),
        ("skip rank=1 at=collective/* seconds=2", "skip does not take seconds="),
        ("skip rank=1 at=collective/allreduce", "names no event"),
    ],
)
def test_a_fault_of_a_collective_that_makes_no_sense_is_refused(text: str, says: str) -> None:
    with pytest.raises(FaultSyntaxError, match=says):
        Fault.parse(text)


def test_only_faults_of_collectives_concern_them() -> None:
    concerned = ["skip rank=0 at=backward", "kill rank=0 at=collective/send"]

    assert all(Fault.parse(text).concerns_collectives for text in concerned)
    for text in ("kill rank=0 at=backward", "kill rank=0 at=*"):
        assert not Fault.parse(text).concerns_collectives


def test_only_a_record_that_is_damaged_for_good_is_in_the_data() -> None:
    spoilt = "spoil rank=* at=data/record persistent=yes"
    assert Fault.parse(f"{spoilt} record=3").is_in_the_data
    for counted in ("nth=2", "attempt=2"):
        assert not Fault.parse(f"{spoilt} {counted}").is_in_the_data
    assert not Fault.parse("spoil rank=* at=data/record").is_in_the_data
