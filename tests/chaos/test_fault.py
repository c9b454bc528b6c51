"""One fault as a value and as one line of text; which ranks it names, which events it counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.chaos.errors import FaultSyntaxError
from seatrial.chaos.events import EVENTS, RECORD, At
from seatrial.chaos.fault import ACTIONS, PARTS, Fault

_NAMES = [event.name for event in EVENTS]
_PATTERNS = ["*", "checkpoint/*", "checkpoint/manifest/*", "restore/*", "*/fsync", "st[ae]*"]
_SECONDS = st.floats(min_value=0, allow_nan=False, allow_infinity=False)

ats = st.builds(At, st.sampled_from(_NAMES + _PATTERNS), st.none() | st.integers(0, 10**6))


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    """Any valid fault."""
    action = draw(st.sampled_from(sorted(ACTIONS)))
    number = st.integers(0, 4096)
    values: dict[str, Any] = draw(
        st.one_of(
            st.fixed_dictionaries({"rank": number}),
            st.fixed_dictionaries({"node": number}),
            st.just({"everyone": True}),
        )
    )
    options: dict[str, st.SearchStrategy[Any]] = {
        "code": st.integers(1, 255),
        "grace": _SECONDS,
        "resume": st.none() | _SECONDS,
        "part": st.sampled_from(PARTS),
        "seconds": _SECONDS,
        "record": st.none() | st.integers(0, 10**6),
    }
    own = {name: draw(options[name]) for name in ACTIONS[action].options}
    reads = action == "spoil"
    return Fault(
        action=action,
        at=At(RECORD, draw(ats).step) if reads else draw(ats),
        nth=draw(st.integers(1, 10**6)),
        when=draw(st.sampled_from(["before"] if reads else ["before", "after"])),
        attempt=draw(st.none() | st.integers(1, 100)),
        persistent=draw(st.booleans()),
        **values,
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
    ],
)
def test_a_label_reads_like_the_fault(text: str, label: str) -> None:
    assert Fault.parse(text).label == label
