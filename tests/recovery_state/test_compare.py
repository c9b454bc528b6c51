"""Verifies that absence never counts as equality and that causes are named before effects."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from seatrial.recovery.compare import (
    Difference,
    combine,
    differences,
    disagreements,
    first_difference,
    first_misplaced,
    holders,
    ordered,
)
from seatrial.recovery.errors import StateError


def part(rank: int, **tensors: tuple[int, int, int, int, str]) -> dict[str, Any]:
    named = {name.replace("__", "/"): list(value) for name, value in tensors.items()}
    return {"rank": rank, "tensors": named, "shared": {"sampler": "aa"}, "own": {"rng/torch": "bb"}}


def test_shards_of_one_replica_add_up_modulo_two_to_the_64() -> None:
    top = 2**64 - 1
    parts = [
        part(0, model__w=(top, 1, 3, 5, "mesh0-1")),
        part(1, model__w=(3, 2, 2, 5, "mesh0-1")),
    ]
    assert combine(parts)["model"] == {"model/w": f"{2:016x}{3:016x}"}


def test_equal_copies_have_the_value_of_one() -> None:
    whole = (7, 8, 5, 5)
    both = combine([part(0, model__w=(*whole, "rank0")), part(1, model__w=(*whole, "rank1"))])
    one = combine([part(0, model__w=(*whole, "rank0"))])
    assert both["model"] == one["model"]
    assert disagreements(both) == []


def test_copies_that_differ_are_reported_and_equal_nothing_else() -> None:
    parts = [part(0, model__w=(7, 8, 5, 5, "rank0")), part(1, model__w=(7, 9, 5, 5, "rank1"))]
    good = combine([part(0, model__w=(7, 8, 5, 5, "rank0")), part(1)])
    bad = combine(parts)
    assert disagreements(bad) == [("model", "model/w")]
    found = first_difference(good, bad)
    assert found == Difference(component="model", name="model/w", kind="copies")
    assert str(found) == "model/w is not the same on all ranks"
    assert first_difference(bad, combine(parts)) is None
    other_way = first_difference(bad, good)
    assert other_way is not None
    assert (other_way.name, other_way.kind) == ("model/w", "uneven")
    assert "is not the same on all ranks of the reference" in str(other_way)


def test_shared_objects_must_be_equal_on_all_ranks() -> None:
    parts = [part(0), part(1) | {"shared": {}}]
    assert disagreements(combine(parts)) == [("sampler", "sampler")]


def test_rank_objects_are_named_by_rank() -> None:
    assert set(combine([part(0), part(1)])["rng"]) == {"rng/torch@rank0", "rng/torch@rank1"}


def test_a_missing_shard_is_an_error() -> None:
    with pytest.raises(StateError, match="covers 3 of its 5 elements in the copy mesh0-1"):
        combine([part(0, model__w=(1, 1, 3, 5, "mesh0-1")), part(1)])


def test_ranks_that_disagree_on_the_size_are_an_error() -> None:
    with pytest.raises(StateError, match=r"how many elements model/w has: \[4, 5\]"):
        combine([part(0, model__w=(1, 1, 5, 5, "rank0")), part(1, model__w=(1, 1, 4, 4, "rank1"))])


@pytest.mark.parametrize("ranks", [[], [0, 0], [1], [0, 2]])
def test_ranks_must_be_complete(ranks: list[int]) -> None:
    with pytest.raises(StateError, match="exactly one part of every rank"):
        combine([part(rank) for rank in ranks])


def test_a_missing_last_rank_is_seen_with_the_world_size() -> None:
    with pytest.raises(StateError, match="exactly one part of every rank"):
        combine([part(0)], world_size=2)


def test_a_state_that_holds_nothing_is_an_error() -> None:
    with pytest.raises(StateError, match="proves nothing"):
        combine([{"rank": 0, "tensors": {}, "shared": {}, "own": {}}])


@pytest.mark.parametrize("empty", [{}, {"model": {}}])
def test_emptiness_is_not_equality(empty: dict[str, dict[str, str]]) -> None:
    whole = {"model": {"model/w": "1"}}
    for pair in [(empty, empty), (empty, whole), (whole, empty)]:
        with pytest.raises(StateError, match="emptiness is not equality"):
            first_difference(*pair)


def test_equal_states_have_no_difference() -> None:
    whole = combine([part(0, model__w=(1, 2, 5, 5, "rank0"))])
    assert first_difference(whole, combine([part(0, model__w=(1, 2, 5, 5, "rank0"))])) is None


def test_causes_come_before_effects() -> None:
    names = ["model", "optimizer", "curriculum", "rng", "scheduler", "progress", "sampler"]
    reference = {name: {name: "1"} for name in names}
    other = {name: {name: "2"} for name in names}
    found = [difference.component for difference in differences(reference, other)]
    assert found == [
        "progress", "sampler", "rng", "scheduler", "curriculum", "optimizer", "model",
    ]  # fmt: skip
    assert ordered(reference) == found


def test_what_only_one_side_has_is_a_difference() -> None:
    reference = {"optimizer": {"optimizer/w/step": "1", "optimizer/w/exp_avg": "2"}}
    other = {"optimizer": {"optimizer/w/step": "1", "optimizer/w/momentum": "2"}}
    kinds = {(found.name, found.kind) for found in differences(reference, other)}
    assert kinds == {("optimizer/w/exp_avg", "missing"), ("optimizer/w/momentum", "unexpected")}


def test_comparing_needs_no_torch() -> None:
    code = "import sys, seatrial.recovery.compare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_whole_copy_that_one_rank_lacks_is_a_difference() -> None:
    shard = [1, 2, 4, 4]
    both = [
        {
            "rank": rank,
            "shared": {},
            "own": {},
            "tensors": {"optimizer/w/m": [*shard, f"rank{rank}"]},
        }
        for rank in range(2)
    ]
    one = [both[0], {**both[1], "tensors": {}}]
    assert (
        first_difference(combine(both), combine(one)) is None
    )  # which is why holders are compared
    assert first_misplaced(holders(both), holders(both)) is None
    lacking = first_misplaced(holders(both), holders(one))
    assert lacking is not None
    assert (lacking.component, lacking.kind) == ("optimizer", "missing")
    assert "rank 1" in lacking.name
