"""Who did not come to a call, told from the logs that ranks leave: groups, messages, chains.

Verifies the reading of logs as ranks write them. That real ranks write them so is for
tests/chaos/test_collectives.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from seatrial.chaos.collectives.last_calls import behind, read_all
from seatrial.recovery.collectives.log import WAITED_FOR

from .written import WrittenLog

GROUPS = {
    "world": (0, 1, 2, 3),
    "left": (0, 1),
    "right": (2, 3),
    "across": (1, 3),
    "pipeline": (0, 1, 2, 3),
}
OPERATIONS = ("all_reduce", "broadcast", "send", "recv", "recv_any")


class Rank:
    """Writes the log of one rank; every group counts for itself, and every pair of ranks."""

    def __init__(self, path: Path, *, capacity: int = 64) -> None:
        self.log = WrittenLog(path, capacity=capacity)
        self._counts: dict[object, int] = {}
        self._named: set[tuple[str, int]] = set()

    def call(
        self, group: str, operation: str = "all_reduce", *, peer: int = -1, state: str = "waited"
    ) -> None:
        """One call, which by default the rank waits for at its end."""
        group_index = list(GROUPS).index(group)
        index = OPERATIONS.index(operation) * 10 + peer + 1
        # Two meshes may describe their groups alike; torch's own names differ.
        self._name("group", group_index, name="mesh", torch=group, ranks=GROUPS[group])
        facts = {"operation": operation, "shapes": "4", "site": f"{group}.py:1"}
        self._name("call", index, **facts | ({"peer": peer} if peer >= 0 else {}))
        stream = (group, operation, peer) if peer >= 0 else (group, operation == "recv_any")
        self._counts[stream] = self._counts.get(stream, 0) + 1
        number = self.log.begin(1.0, group_index, index, self._counts[stream])
        if state == "waited":
            self.log.tell(number, WAITED_FOR)
        elif state == "done":
            self.log.tell(number, 0.1)

    def done(self, *groups: str) -> None:
        for group in groups:
            self.call(group, state="done")

    def _name(self, kind: str, index: int, **facts: object) -> None:
        if (kind, index) not in self._named:
            self._named.add((kind, index))
            self.log.name(kind, index, **facts)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    made = [Rank(tmp_path / f"rank{rank}.calls") for rank in range(4)]
    yield made
    for rank in made:
        rank.log.close()


@pytest.fixture
def told(tmp_path: Path, ranks: list[Rank]) -> Callable[[], str]:
    logs = {rank: tmp_path / f"rank{rank}.calls" for rank in range(4)}
    return lambda: behind(read_all(logs))


def test_nobody_is_behind_where_all_calls_are_done(
    ranks: list[Rank], told: Callable[[], str]
) -> None:
    for rank in ranks:
        rank.done("world", "world")
    assert told() == ""


def test_the_rank_that_did_not_come_is_named(ranks: list[Rank], told: Callable[[], str]) -> None:
    for rank in ranks:
        rank.done("world")
    for rank in (0, 1, 3):
        ranks[rank].call("world")
    assert told().startswith("rank 2 did not come to all_reduce #2 of group mesh")
    assert told().endswith("where rank 0 waits")


def test_groups_that_are_described_alike_are_counted_apart(
    ranks: list[Rank], told: Callable[[], str]
) -> None:
    # Rank 1 is far ahead in another group with the same description and the same members.
    for rank in (0, 2, 3):
        ranks[rank].call("world")
    ranks[1].done("pipeline", "pipeline", "pipeline")
    assert told().startswith("rank 1 did not come to all_reduce #1")


def test_of_ranks_that_wait_in_a_chain_of_groups_the_one_at_its_end_is_named(
    ranks: list[Rank], told: Callable[[], str]
) -> None:
    ranks[0].call("left")  # for rank 1
    ranks[1].call("across")  # for rank 3
    ranks[2].call("right")  # for rank 3
    said = told()
    assert said.startswith("rank 3 did not come to all_reduce #1 of group mesh (4) at across.py:1")
    assert "rank 1 did not come" not in said
    assert said.endswith("where rank 1 waits; ranks 0, 2 wait for others that wait")


def test_ranks_that_wait_for_each_other_are_not_blamed_for_one_another(
    ranks: list[Rank], told: Callable[[], str]
) -> None:
    ranks[0].call("world")
    ranks[1].call("left")
    ranks[2].call("world")
    ranks[3].call("world")
    said = told()
    assert said.startswith("the ranks wait for each other: rank 0 in all_reduce #1")
    assert "rank 1 in all_reduce #1 of group mesh (4) at left.py:1, waited for, for rank 0" in said


def test_a_call_that_a_rank_is_not_seen_to_wait_for_does_not_excuse_it(
    ranks: list[Rank], told: Callable[[], str]
) -> None:
    # Rank 3 has begun a call and gone on, to be stopped; the others wait for it elsewhere.
    ranks[3].call("right", state="under way")
    for rank in (0, 1, 2):
        ranks[rank].call("world")
    said = told()
    assert said.startswith("rank 3 did not come to all_reduce #1 of group mesh (4) at world.py:1")
    assert said.endswith("right.py:1, under way, to which rank 2 did not come")


def test_of_two_calls_under_way_the_one_that_is_waited_for_counts(
    ranks: list[Rank], told: Callable[[], str]
) -> None:
    ranks[0].call("world", state="under way")  # to be waited for later
    ranks[0].call("left")
    ranks[1].call("left", "broadcast")
    assert told().startswith("rank 1 called broadcast #1")


def test_a_rank_that_did_not_send_is_named(ranks: list[Rank], told: Callable[[], str]) -> None:
    ranks[0].call("pipeline", "send", peer=1, state="done")
    ranks[1].call("pipeline", "recv", peer=0, state="done")
    ranks[1].call("pipeline", "recv", peer=0)
    assert told().startswith("rank 0 did not come to recv #2")


def test_a_rank_that_did_not_receive_is_named(ranks: list[Rank], told: Callable[[], str]) -> None:
    ranks[2].call("pipeline", "send", peer=3)
    assert told().startswith("rank 3 did not come to send #1")


def test_messages_the_other_way_do_not_count(ranks: list[Rank], told: Callable[[], str]) -> None:
    ranks[0].call("pipeline", "recv", peer=1, state="done")
    ranks[1].call("pipeline", "recv", peer=0)
    assert told().startswith("rank 0 did not come to recv #1")


def test_a_message_that_nobody_waits_for_says_nothing(
    ranks: list[Rank], told: Callable[[], str]
) -> None:
    # Rank 0 has sent and gone on, to be stopped; rank 1 waits for it elsewhere.
    ranks[0].call("pipeline", "send", peer=1, state="under way")
    ranks[0].done("world")
    for rank in (1, 2, 3):
        ranks[rank].done("world")
        ranks[rank].call("world")
    assert told().startswith("rank 0 did not come to all_reduce #2")


def test_a_receive_from_any_rank_blames_nobody(ranks: list[Rank], told: Callable[[], str]) -> None:
    ranks[0].call("pipeline", "recv_any")
    assert told() == ""
    ranks[1].call("pipeline", "send", peer=0)  # which the receive from any may have taken
    assert told() == ""


def test_calls_that_the_ring_no_longer_holds_blame_nobody(
    tmp_path: Path, ranks: list[Rank], told: Callable[[], str]
) -> None:
    ranks[0].done(*["world"] * 3)
    ranks[0].call("world")
    ranks[2].done(*["world"] * 3)
    ranks[3].done(*["world"] * 3)
    ranks[2].call("world")
    ranks[3].call("world")
    ranks[1].log.close()
    ranks[1] = Rank(tmp_path / "rank1.calls", capacity=2)
    ranks[1].done("world", "world", "world", "world", "left", "left", "left")
    assert told() == ""


def test_a_call_whose_future_was_taken_counts_though_nobody_was_seen_to_wait(
    ranks: list[Rank], told: Callable[[], str]
) -> None:
    for rank in (0, 1, 2):
        ranks[rank].call("world", state="under way")
    assert told().startswith("rank 3 did not come to all_reduce #1")


def test_a_rank_in_another_collective_is_named_with_both(
    ranks: list[Rank], told: Callable[[], str]
) -> None:
    ranks[0].call("left")
    ranks[1].call("left", "broadcast")
    assert told().startswith("rank 1 called broadcast #1")
    assert "where rank 0 called all_reduce" in told()
