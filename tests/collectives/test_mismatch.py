"""Comparing what ranks called: the first difference is found and said, and nothing else is one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from seatrial.recovery.collectives.mismatch import (
    Alias,
    Calls,
    Entry,
    compare_all,
    compare_collectives,
    compare_messages,
    is_root,
)
from seatrial.recovery.errors import CollectiveMismatchError

SUM = ("all_reduce", "4", "float32", "SUM", "a.py:1 in f")
MAX = ("all_reduce", "4", "float32", "MAX", "a.py:1 in f")
INTEGERS = ("all_reduce", "4", "int32", "SUM", "a.py:1 in f")
LARGER = ("all_reduce", "8", "float32", "SUM", "a.py:1 in f")
ELSEWHERE = ("all_reduce", "4", "float32", "SUM", "a.py:9 in g")
BROADCAST = ("broadcast", "4", "float32", "root 0", "a.py:2 in f")
OTHER_ROOT = ("broadcast", "4", "float32", "root 1", "a.py:2 in f")


def stream(
    rank: int,
    calls: Sequence[Entry],
    *,
    older: int = 0,
    base: int = 0,
    before: int = 0,
    unsettled: bool = False,
    sites: Sequence[str] = (),
) -> Calls:
    rooted = [entry for entry in calls if "root" in entry[3]]
    return Calls(
        rank=rank,
        older=older,
        base=base,
        sequence=before + older + len(calls),
        calls=calls,
        unsettled=unsettled,
        sites=frozenset([*sites, *(entry[4] for entry in calls)]),
        as_root=frozenset(entry[4] for entry in rooted if is_root(entry[3], rank)),
        as_other=frozenset(entry[4] for entry in rooted if not is_root(entry[3], rank)),
    )


def compare(*calls: Sequence[Entry]) -> list[Alias]:
    return compare_collectives("key", "dp", [stream(rank, own) for rank, own in enumerate(calls)])


def test_equal_calls_are_no_difference() -> None:
    assert compare([SUM, BROADCAST], [SUM, BROADCAST]) == []


@pytest.mark.parametrize(
    ("one", "other", "state"),
    [
        (SUM, BROADCAST, "COLLECTIVE_TYPE_MISMATCH"),
        (SUM, LARGER, "SIZE_OR_SYNTAX_MISMATCH"),
        (SUM, INTEGERS, "COLLECTIVE_DTYPE_MISMATCH"),
        (SUM, MAX, "SIZE_OR_SYNTAX_MISMATCH"),
        (BROADCAST, OTHER_ROOT, "SIZE_OR_SYNTAX_MISMATCH"),
    ],
)
def test_a_difference_has_the_flight_recorder_s_word(one: Entry, other: Entry, state: str) -> None:
    with pytest.raises(CollectiveMismatchError, match=rf"^{state} in group dp, call 2"):
        compare([SUM, one], [SUM, other])


def test_the_ranks_and_both_calls_are_named() -> None:
    with pytest.raises(CollectiveMismatchError) as caught:
        compare([SUM], [SUM], [BROADCAST])
    assert str(caught.value).endswith(
        ": ranks 0, 1 called all_reduce(4 float32 SUM) at a.py:1 in f; "
        "rank 2 called broadcast(4 float32 root 0) at a.py:2 in f"
    )


def test_equal_calls_from_two_lines_in_another_order_are_out_of_order() -> None:
    with pytest.raises(CollectiveMismatchError, match=r"^COLLECTIVE_ORDER_MISMATCH .*, call 1"):
        compare([SUM, ELSEWHERE], [ELSEWHERE, SUM])


def test_a_line_that_the_other_rank_calls_from_at_other_times_is_out_of_order() -> None:
    streams = [stream(0, [SUM], sites=[ELSEWHERE[4]]), stream(1, [ELSEWHERE])]
    with pytest.raises(CollectiveMismatchError, match=r"^COLLECTIVE_ORDER_MISMATCH"):
        compare_collectives("key", "dp", streams)


def test_ranks_that_take_other_branches_may_call_from_other_lines() -> None:
    third = (*SUM[:4], "a.py:20 in h")
    assert compare([SUM, SUM], [ELSEWHERE, third]) == [
        ("key", ELSEWHERE[4], SUM[4]),
        ("key", third[4], SUM[4]),
    ]


def rooted(root: int, line: int) -> Entry:
    return ("broadcast", "4", "float32", f"root {root}", f"a.py:{line} in f")


GIVES, TAKES = 1, 2
"""Lines of ``broadcast(mine, src)`` and of ``broadcast(theirs, src)``."""


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_may_take_turns_as_the_root_by_a_line_of_its_own(ranks: int) -> None:
    turns = [
        [rooted(root, GIVES if root == rank else TAKES) for root in range(ranks)]
        for rank in range(ranks)
    ]
    assert compare(*turns) == [("key", f"a.py:{TAKES} in f", f"a.py:{GIVES} in f")]


@pytest.mark.parametrize("root", [0, 1])
def test_two_broadcasts_of_one_root_in_another_order_are_out_of_order(root: int) -> None:
    with pytest.raises(CollectiveMismatchError, match=r"^COLLECTIVE_ORDER_MISMATCH .*, call 1"):
        compare([rooted(root, 1), rooted(root, 2)], [rooted(root, 2), rooted(root, 1)])


def test_a_root_that_calls_from_the_line_of_the_others_is_out_of_order() -> None:
    ours = [rooted(0, GIVES), rooted(1, TAKES), rooted(0, TAKES)]
    theirs = [rooted(0, TAKES), rooted(1, GIVES), rooted(0, GIVES)]
    with pytest.raises(CollectiveMismatchError, match=r"^COLLECTIVE_ORDER_MISMATCH"):
        compare(ours, theirs)


def test_ranks_that_swap_calls_for_which_the_first_has_lines_of_its_own_are_out_of_order() -> None:
    first, second = (*SUM[:4], "a.py:20 in h"), (*SUM[:4], "a.py:21 in h")
    with pytest.raises(CollectiveMismatchError, match=r"^COLLECTIVE_ORDER_MISMATCH"):
        compare([SUM, ELSEWHERE], [first, second], [second, first])


def test_a_missing_call_is_numbered_and_blamed() -> None:
    streams = [stream(0, [SUM, BROADCAST], before=40), stream(1, [SUM], before=40)]
    with pytest.raises(CollectiveMismatchError) as caught:
        compare_collectives("key", "dp", streams)
    assert str(caught.value) == (
        "COLLECTIVE_MISSING in group dp, call 42: rank 0 called "
        "broadcast(4 float32 root 0) at a.py:2 in f, rank 1 did not"
    )


def test_a_background_thread_may_be_ahead() -> None:
    streams = [stream(0, [SUM, BROADCAST]), stream(1, [SUM], unsettled=True)]
    assert compare_collectives("key", "dp", streams) == []


def test_a_background_thread_may_not_differ() -> None:
    streams = [stream(0, [BROADCAST, BROADCAST]), stream(1, [SUM], unsettled=True)]
    with pytest.raises(CollectiveMismatchError, match=r"^COLLECTIVE_TYPE_MISMATCH"):
        compare_collectives("key", "dp", streams)


def test_calls_that_are_no_longer_kept_may_not_differ() -> None:
    streams = [stream(0, [SUM], older=9, base=1), stream(1, [SUM], older=9, base=2)]
    with pytest.raises(CollectiveMismatchError, match=r"^UNDECIDED"):
        compare_collectives("key", "dp", streams)


def test_a_message_is_compared_with_what_the_peer_expects() -> None:
    sent = stream(0, [("send", "4", "float32", "tag 0", "a.py:1 in f")])
    received = stream(1, [("recv", "8", "float32", "tag 0", "b.py:1 in g")])
    with pytest.raises(CollectiveMismatchError, match="message 1 from rank 0 to rank 1"):
        compare_messages("pp", sent, received)


def test_a_message_may_be_on_its_way() -> None:
    entry = ("send", "4", "float32", "tag 0", "a.py:1 in f")
    compare_messages("pp", stream(0, [entry, entry]), stream(1, [("recv", *entry[1:])]))


def test_groups_are_compared_each_by_itself() -> None:
    def said(*groups: tuple[str, Entry]) -> dict[str, object]:
        facts = {
            name: {
                "name": name,
                "older": 0,
                "base": 0,
                "sequence": 1,
                "calls": [entry],
                "unsettled": False,
                "sites": [entry[4]],
                "as_root": [],
                "as_other": [],
            }
            for name, entry in groups
        }
        return {"collectives": facts, "pairs": {}}

    compare_all([said(("red", SUM), ("blue", MAX)), said(("blue", MAX), ("red", SUM))])
    with pytest.raises(CollectiveMismatchError, match="in group blue"):
        compare_all([said(("red", SUM), ("blue", MAX)), said(("red", SUM), ("blue", SUM))])
