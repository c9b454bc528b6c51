"""Verifies the bundled GPT on every kind of parallelism, on real gloo ranks: it trains as on one
rank, two runs and a resumed one are bitwise equal, every sample of an epoch is reported once, and
an overflow is agreed upon.

The checkpoint store has no part in it; what one topology saved and another restores is verified in
test_resharding.py, kills in ci/suite. Nothing here compares runs of two topologies bitwise: sums in
another order round otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from seatrial.chaos.errors import UsageError
from seatrial.plugins.jobs.gpt_config import check
from seatrial.recovery.compare import Combined, combine, differences, disagreements
from seatrial.recovery.topology import Topology

from .conftest import Once, RunRanks

TOPOLOGIES = (
    *("dp1", "dp2", "dp4", "fsdp2", "fsdp4", "hsdp2x2", "tp2", "fsdp2-tp2", "dp2-tp2", "pp2"),
    *(
        "pp2-dp2",
        "pp2-fsdp2",
        "pp2-tp2",
        "zero1-dp2",
        "dp2-tp2-pp2",
        "ep2",
        "dp2-ep2",
        "cp2",
        "fsdp2-cp2",
    ),
)
SMALL = {"samples": 39, "width": 16}

on_each_topology = pytest.mark.parametrize("topology", TOPOLOGIES)


Evidence = Callable[[str], list[Any]]


def has_experts(topology: str) -> bool:
    return Topology.parse(topology).size("ep") > 1


@pytest.fixture
def proved(run_ranks: RunRanks, once: Once) -> Callable[..., list[Any]]:
    """``proved("tp2")``: by rank, what the scenario ``prove`` shows; made once."""

    def obtain(topology: str, *, experts: bool | None = None) -> list[Any]:
        count = 4 if (has_experts(topology) if experts is None else experts) else 0
        _, ranks = once(
            f"proved-{topology}-{count}",
            lambda _: run_ranks("prove", topology, experts=count, **SMALL),
        )
        found: list[Any] = ranks
        return found

    return obtain


def whole(records: list[Any]) -> Combined:
    return combine(records, world_size=len(records))


@on_each_topology
def test_the_mesh_has_the_groups_of_the_topology(proved: Evidence, topology: str) -> None:
    parsed = Topology.parse(topology)
    for rank, shown in enumerate(proved(topology)):
        groups = shown["meshes"]
        assert groups == {name: [*parsed.group(name, rank=rank)] for name in groups}
        assert len(groups) == max(1, sum(size > 1 for _, size in parsed.sizes))


@pytest.mark.parametrize("run", ["plain", "clipped"])
@on_each_topology
def test_it_trains_as_on_one_rank(
    proved: Callable[..., list[Any]], topology: str, run: str
) -> None:
    # A sanity check, within rounding. Plain: nothing hides the size of a gradient. Clipped: every
    # step exceeds the largest norm, so another norm would scale the gradients otherwise.
    (alone,) = (rank[run] for rank in proved("dp1", experts=has_experts(topology)))
    seen: dict[str, float] = {}
    for rank in (rank[run] for rank in proved(topology)):
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        for name, norm in rank["moments"].items():
            assert norm == pytest.approx(alone["moments"][name], rel=1e-3), name
        seen |= rank["moments"]
    assert seen.keys() == alone["moments"].keys()


@on_each_topology
def test_two_runs_are_equal_and_a_resumed_one_too(
    proved: Evidence, run_ranks: RunRanks, topology: str
) -> None:
    # Resumed after 2 steps of 4; the third has the uneven end of an epoch, the fourth is another's.
    ranks = [rank["resume"] for rank in proved(topology)]
    experts = 4 if has_experts(topology) else 0
    again = run_ranks("train", topology, steps=4, experts=experts, **SMALL)
    for rank, other in zip(ranks, again, strict=True):
        # The first record of each is the state alone, the others have the outputs of a step too.
        assert other[2]["fingerprint"] == rank["uninterrupted"][0]["fingerprint"]
        assert other[3:] == rank["uninterrupted"][1:]
        assert rank["resumed"] == rank["uninterrupted"]
    states = [whole([rank["resumed"][step]["fingerprint"] for rank in ranks]) for step in (0, -1)]
    assert [disagreements(state) for state in states] == [[], []]
    changed = {found.component for found in differences(*states)}
    assert changed == {
        "progress", "sampler", "rng", "scheduler", "scaler", "optimizer", "model",
    }  # fmt: skip
    consumed = Counter(sample for rank in again for step in rank[1:4] for sample in step["samples"])
    assert consumed == Counter(range(39))


@on_each_topology
def test_an_overflow_on_one_rank_skips_the_step_on_all(proved: Evidence, topology: str) -> None:
    ranks = [rank["overflow"] for rank in proved(topology)]
    before, after = (whole([rank[when] for rank in ranks]) for when in ("before", "after"))
    assert after["model"] == before["model"]
    assert after["scheduler"] == before["scheduler"]
    assert {rank["scale"] for rank in ranks} == {512.0}


@on_each_topology
def test_every_rank_announces_every_phase(proved: Evidence, topology: str) -> None:
    for rank in proved(topology):
        seen = rank["phases"]
        assert Counter(seen) == {"data": 1, "forward": 2, "backward": 2, "optimizer": 1}
        assert (seen[0], seen[-1]) == ("data", "optimizer")


@pytest.mark.parametrize(
    ("topology", "options", "said"),
    [
        ("tp3", {}, "heads=2 do not divide over 3 tensor-parallel ranks"),
        ("pp4", {}, "layers=2 are fewer than its 4 stages"),
        ("pp4", {"layers": "4"}, "a pipeline of 4 stages needs as many micro-batches; set accum"),
        ("cp3", {}, "does not divide over 3 context-parallel ranks"),
        ("ep2", {}, "the model has no experts to spread; set experts=4 and"),
        ("ep3", {"experts": "4"}, "experts=4 do not divide over 3 ranks"),
        ("ep2-tp2", {"experts": "4"}, "expert parallelism (ep) goes with dp, and with nothing"),
        ("fsdp2-ep2", {"experts": "4"}, "expert parallelism (ep) goes with dp, and with nothing"),
        ("cp2-pp2", {}, "context parallelism (cp) goes with dp or with fsdp, and with nothing"),
        ("hsdp2x2-cp2", {}, "context parallelism (cp) goes with dp or with fsdp"),
    ],
)
def test_what_the_model_cannot_do_is_refused_in_a_sentence(
    topology: str, options: dict[str, object], said: str
) -> None:
    with pytest.raises(UsageError) as refused:
        check(options, topology)
    printed = Topology.parse(topology)
    assert str(refused.value).startswith(f"the job gpt cannot run on {printed}: ")
    assert said in str(refused.value)
