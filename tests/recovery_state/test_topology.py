"""Verifies the topology as a value: its text, its product, where ranks sit, and its groups.

That the mesh agrees with the groups is verified on real ranks, in tests/jobs.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.recovery.errors import TopologyError
from seatrial.recovery.topology import DIMENSIONS, Topology

TOPOLOGIES = st.builds(
    lambda sizes: Topology(tuple((name, sizes[name]) for name in DIMENSIONS if name in sizes)),
    st.dictionaries(st.sampled_from(DIMENSIONS), st.integers(1, 4), min_size=1),
)


@given(TOPOLOGIES)
def test_what_is_printed_parses_back(topology: Topology) -> None:
    assert Topology.parse(str(topology)) == topology


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("dp2-tp2-pp1", "dp2-tp2-pp1"),
        ("pp2-dp2", "dp2-pp2"),
        ("hsdp2x4", "hsdp2x4"),
        ("dp2-fsdp4", "hsdp2x4"),
        ("zero1-dp2", "zero1-dp2"),
        ("dp2-zero1", "zero1-dp2"),
    ],
)
def test_each_spelling_has_one_printed_form(text: str, printed: str) -> None:
    assert str(Topology.parse(text)) == printed
    assert Topology.parse(text).world_size in (2, 4, 8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is not a dimension and its size"),
        ("dp", "'dp' is not a dimension"),
        ("dp0", "'dp0' is not a dimension"),
        ("sp2", "dimensions from dp, fsdp, tp, pp, cp, ep"),
        ("dp2-dp2", "names 'dp' twice"),
        ("hsdp2x2-dp2", "names 'dp' twice"),
        ("hsdp2", "'hsdp2' is not a dimension"),
        ("zero1", "zero1 shares the optimizer's state among dp ranks alone"),
        ("zero1-fsdp2", "zero1 shares the optimizer's state among dp ranks alone"),
        ("zero1-dp2-tp2", "zero1 shares the optimizer's state among dp ranks alone"),
        ("zero3-dp2", "'zero3' is not a dimension"),
        ("zero1-zero1-dp2", "'zero1' is not a dimension"),
    ],
)
def test_what_is_no_topology_is_refused_in_a_sentence(text: str, said: str) -> None:
    with pytest.raises(TopologyError) as refused:
        Topology.parse(text)
    assert said in str(refused.value)


def test_the_product_is_checked_against_the_world_size() -> None:
    topology = Topology.parse("dp2-tp2-pp2")
    topology.require(8)
    with pytest.raises(TopologyError, match=r"needs 8 ranks \(dp 2 x tp 2 x pp 2\), .* has 4"):
        topology.require(4)


@given(TOPOLOGIES)
def test_coordinates_number_the_ranks_without_gap_or_repetition(topology: Topology) -> None:
    places = [tuple(topology.coordinates(rank).items()) for rank in range(topology.world_size)]
    assert len(set(places)) == topology.world_size
    for place in places:
        assert all(0 <= at < topology.size(name) for name, at in place)


def test_tensor_ranks_are_neighbours_and_pipeline_stages_far_apart() -> None:
    topology = Topology.parse("dp2-tp2-pp2")
    assert topology.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert topology.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert topology.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert topology.groups("dp", "tp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert topology.groups("cp") == tuple((rank,) for rank in range(8))
    assert topology.group("pp", rank=5) == (1, 5)


def test_a_rank_or_a_dimension_that_does_not_exist_is_refused() -> None:
    topology = Topology.parse("dp2")
    with pytest.raises(TopologyError, match="has 2 ranks, and no rank 2"):
        topology.coordinates(2)
    with pytest.raises(TopologyError, match="'sp' is not one of dp, fsdp"):
        topology.groups("sp")


@given(TOPOLOGIES)
def test_every_part_of_a_batch_has_equally_many_ranks(topology: Topology) -> None:
    parts = [topology.data_index(rank) for rank in range(topology.world_size)]
    copies = topology.world_size // topology.data_size
    assert sorted(parts) == sorted([*range(topology.data_size)] * copies)


def test_ranks_that_hold_parts_of_one_sample_share_their_part_of_the_batch() -> None:
    for text in ("tp2", "pp2", "cp2"):
        assert [Topology.parse(text).data_index(rank) for rank in (0, 1)] == [0, 0]
    for text in ("dp2", "fsdp2", "ep2"):
        assert [Topology.parse(text).data_index(rank) for rank in (0, 1)] == [0, 1]


def test_the_global_batch_is_micro_batch_times_accumulation_times_data_ranks() -> None:
    topology = Topology.parse("hsdp2x2-tp2-pp2")
    assert topology.global_batch(micro_batch=3, accumulation=5) == 3 * 5 * 4
