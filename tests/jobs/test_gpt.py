"""Verifies on real gloo ranks that the GPT job resumes bitwise and that shards add up.

The checkpoint store has no part in it: states are captured in memory and put back.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from seatrial.chaos.errors import UsageError
from seatrial.plugins.jobs.gpt import GPTJob
from seatrial.plugins.jobs.gpt_config import GPTConfig
from seatrial.recovery.compare import Combined, combine, differences, disagreements

from_hex = float.fromhex

# Batches of 16, 16 and 7: the tail is uneven, on 4 ranks one micro-batch of it is empty, and nine
# steps cross two epochs.
SMALL = {"samples": 39, "width": 16}


def whole(records: list[Any]) -> Combined:
    return combine(records, world_size=len(records))


def without_rng(state: Combined) -> Combined:
    return {component: values for component, values in state.items() if component != "rng"}


@pytest.mark.parametrize(
    ("topology", "autocast_cpu"),
    [("dp2", False), ("dp2", True), ("fsdp2", False), ("fsdp2", True), ("dp4", False)],
)
def test_a_resumed_run_equals_the_uninterrupted_one_bitwise(
    run_ranks: Any, topology: str, autocast_cpu: bool
) -> None:
    ranks = run_ranks("resume", topology, autocast_cpu=autocast_cpu, **SMALL)
    for rank in ranks:
        for step, (expected, found) in enumerate(
            zip(rank["uninterrupted"], rank["resumed"], strict=True)
        ):
            assert found == expected, f"{step} steps after the restore"
    states = [whole([rank["resumed"][step]["fingerprint"] for rank in ranks]) for step in range(6)]
    changed = {found.component for found in differences(states[0], states[-1])}
    # Everything that could be forgotten did move, or equality would prove nothing.
    assert changed == {
        "progress", "sampler", "rng", "scheduler", "scaler", "optimizer", "model",
    }  # fmt: skip
    assert [disagreements(state) for state in states] == [[]] * 6


def test_shards_add_up_to_the_unsharded_model(run_ranks: Any) -> None:
    states = {
        topology: whole([rank[0]["fingerprint"] for rank in run_ranks("train", topology, steps=0)])
        for topology in ("dp1", "fsdp3")
    }
    assert states["fsdp3"]["model"] == states["dp1"]["model"]
    assert len(states["dp1"]["model"]) == 20


def test_a_state_is_the_same_on_another_topology(run_ranks: Any) -> None:
    ranks = run_ranks("reshard", "dp2", **SMALL)
    before, after = (whole([rank[when] for rank in ranks]) for when in ("before", "after"))
    assert before == after


def test_every_way_to_cut_a_tensor_adds_up_to_the_whole(run_ranks: Any) -> None:
    ranks = run_ranks("layouts", "dp4")
    uncut, cut = (whole([rank[kind] for rank in ranks]) for kind in ("whole", "cut"))
    assert disagreements(cut) == []
    assert cut == uncut


def test_the_state_is_read_sharded_after_a_forward_pass_alone(run_ranks: Any) -> None:
    for rank in run_ranks("partial", "fsdp2"):
        assert rank["after"]["tensors"] == rank["before"]["tensors"]


def test_every_sample_of_an_epoch_has_exactly_one_rank(run_ranks: Any) -> None:
    ranks = run_ranks("train", "dp4", steps=3, **SMALL)
    consumed = Counter(sample for rank in ranks for step in rank[1:] for sample in step["samples"])
    assert consumed == Counter(range(39))
    assert [step["tokens"] for step in ranks[0][1:]] == [16 * 16, 16 * 16, 7 * 16]


def test_loss_and_gradient_do_not_depend_on_how_a_batch_is_shared(run_ranks: Any) -> None:
    options = {**SMALL, "dropout": 0, "augment": 0, "amp": False, "clip": 1e9, "steps": 4}
    runs = {name: run_ranks("train", name, **options)[0][1:] for name in ("dp1", "dp4", "fsdp3")}
    losses = {name: [from_hex(step["loss"]) for step in run] for name, run in runs.items()}
    moments = {name: [step["moment"] for step in run] for name, run in runs.items()}
    for other in ("dp4", "fsdp3"):
        assert losses[other] == pytest.approx(losses["dp1"], rel=1e-5)
        assert moments[other] == pytest.approx(moments["dp1"], rel=1e-3)


def test_autocast_is_for_gpus_unless_a_cpu_is_asked_for(run_ranks: Any) -> None:
    """Half precision rounds, so a run that really used it has another loss."""
    runs = [run_ranks("train", "dp1", steps=1, autocast_cpu=on, **SMALL) for on in (False, True)]
    full, half = (from_hex(ranks[0][1]["loss"]) for ranks in runs)
    assert full != half == pytest.approx(full, rel=1e-2)


def test_two_runs_are_equal_and_their_ranks_draw_different_numbers(run_ranks: Any) -> None:
    first, second = (run_ranks("train", "dp2", steps=1, **SMALL) for _ in range(2))
    assert first == second
    streams = [rank[0]["fingerprint"]["own"] for rank in first]
    assert all(streams[0][name] != streams[1][name] for name in streams[0])


@pytest.mark.parametrize("topology", ["dp2", "fsdp2"])
def test_an_overflow_skips_the_step_on_every_rank(run_ranks: Any, topology: str) -> None:
    ranks = run_ranks("train", topology, steps=1, init_scale=2.0**40, autocast_cpu=True, **SMALL)
    before, after = (whole([rank[step]["fingerprint"] for rank in ranks]) for step in (0, 1))
    assert after["model"] == before["model"]
    assert after["scheduler"] == before["scheduler"]
    assert [rank[1]["scale"] for rank in ranks] == [2.0**39] * 2


def test_phases_are_announced_once_per_micro_batch(run_ranks: Any) -> None:
    seen = ["data", *["forward", "backward"] * 2, "optimizer"]
    assert run_ranks("phases", "dp1") == [seen]


def test_options_may_be_strings() -> None:
    config = GPTJob(width="64", lr="0.5", tied="false", text="a=b").config
    assert config == GPTConfig(width=64, lr=0.5, tied=False, text="a=b")


def test_an_unknown_option_lists_the_valid_ones() -> None:
    with pytest.raises(UsageError, match="job gpt has no option 'depth'; its options are width, l"):
        GPTJob(depth="3")


@pytest.mark.parametrize(
    ("option", "valid"), [({"width": "x"}, "of type int"), ({"amp": "maybe"}, "true or false")]
)
def test_a_value_of_another_type_is_refused(option: dict[str, str], valid: str) -> None:
    with pytest.raises(UsageError, match=f"must be {valid}"):
        GPTJob(**option)
