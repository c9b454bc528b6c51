"""Verifies that the ledger of samples stays exactly-once through any sequence of kills and changes
of the number of ranks, whatever becomes of the end of an epoch; and that it notices otherwise.

The sampler and the ledger are the real ones; ranks, checkpoints and kills are made up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from seatrial.chaos.samples import sample_faults
from seatrial.chaos.trajectory import Beginning, Step, Trajectory
from seatrial.recovery.sampler import TAILS, ShuffleSampler


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """``steps`` more steps on ``ranks`` ranks; a kill follows, and a restore of the newest
    checkpoint or, of ``back`` more, an older one (what is damaged is not restored)."""

    ranks: int
    steps: int
    back: int


attempts = st.builds(
    Attempt, ranks=st.integers(1, 5), steps=st.integers(0, 7), back=st.integers(0, 1)
)


def run(
    made: ShuffleSampler, plan: list[Attempt], interval: int, *, forgets: bool = False
) -> Trajectory:
    """What the traces of such a run say; a job that ``forgets`` restores no sampler."""
    fresh = made.state_dict()
    saved: list[tuple[int, int, dict[str, int | str]]] = []  # step, attempt, the sampler's state
    beginnings, steps = [], []
    for number, attempt in enumerate(plan, start=1):
        kept = saved[: len(saved) - attempt.back] if len(saved) > attempt.back else saved
        step, source, state = kept[-1] if kept else (0, None, fresh)
        saved = list(kept)
        made.load_state_dict(fresh if forgets else state)
        beginnings.append(
            Beginning(
                attempt=number,
                restored=step or None,
                source=source,
                damaged=(),
                notes=(),
                state={},
                holders={},
                samples_per_epoch=made.samples_per_epoch,
                t=0.0,
            )
        )
        for _ in range(attempt.steps):
            step += 1
            before, outputs = made.state_dict(), []
            for rank in range(attempt.ranks):
                made.load_state_dict(before)  # every rank has a sampler of its own
                share = made.next_share(rank=rank, world_size=attempt.ranks)
                assert share.indices.tolist() == [*share.samples, *share.padding]
                outputs.append(
                    {"samples": [share.epoch, list(share.samples)], "padding": list(share.padding)}
                )
            steps.append(
                Step(
                    number=step, attempt=number, state={}, holders={}, outputs=tuple(outputs), t=0.0
                )
            )
            if step % interval == 0:
                saved.append((step, number, made.state_dict()))
    return Trajectory(beginnings=tuple(beginnings), steps=tuple(steps), reached={})


@given(
    samples=st.integers(1, 25),
    batch=st.integers(1, 9),
    tail=st.sampled_from(TAILS),
    plan=st.lists(attempts, min_size=1, max_size=5),
    interval=st.integers(1, 4),
)
def test_every_sample_has_one_owner_through_any_sequence_of_kills_and_reshards(
    samples: int, batch: int, tail: str, plan: list[Attempt], interval: int
) -> None:
    assume(tail != "drop" or samples >= batch)
    sampler = ShuffleSampler(num_samples=samples, seed=3, batch_size=batch, tail=tail)
    trajectory = run(sampler, [*plan, Attempt(ranks=2, steps=2, back=0)], interval)
    assert list(sample_faults(trajectory)) == []
    numbers = [step.number for step in trajectory.lineage()]
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("tail", TAILS)
def test_a_sampler_that_is_not_restored_is_noticed(tail: str) -> None:
    sampler = ShuffleSampler(num_samples=10, seed=3, batch_size=4, tail=tail)
    plan = [Attempt(ranks=2, steps=2, back=0), Attempt(ranks=4, steps=4, back=0)]
    (first, *_) = sample_faults(run(sampler, plan, interval=1, forgets=True))
    assert first.startswith("epoch 0: sample ")
    assert first.endswith(" is consumed 2 times")


@pytest.mark.parametrize(
    ("tail", "sizes", "used"),
    [
        ("partial", [4, 4, 2, 4], 10),
        ("drop", [4, 4, 4, 4], 8),
        ("pad", [4, 4, 4, 4], 10),
    ],
)
def test_the_end_of_an_epoch_is_as_its_name_says(tail: str, sizes: list[int], used: int) -> None:
    sampler = ShuffleSampler(num_samples=10, seed=3, batch_size=4, tail=tail)
    shares = [sampler.next_share(rank=0, world_size=1) for _ in range(4)]
    assert [len(share.indices) for share in shares] == sizes
    epoch = [sample for share in shares if share.epoch == 0 for sample in share.samples]
    assert len(epoch) == len(set(epoch)) == used == sampler.samples_per_epoch
    padding = [share.padding for share in shares]
    assert padding == ([(), (), shares[0].samples[:2], ()] if tail == "pad" else [()] * 4)


def with_outputs(trajectory: Trajectory, index: int, **changed: object) -> Trajectory:
    steps = list(trajectory.steps)
    first, *others = steps[index].outputs
    steps[index] = replace(steps[index], outputs=({**first, **changed}, *others))
    return replace(trajectory, steps=tuple(steps))


def test_a_sample_that_only_fills_a_batch_up_is_noticed() -> None:
    sampler = ShuffleSampler(num_samples=10, seed=3, batch_size=4, tail="drop")
    trajectory = run(sampler, [Attempt(ranks=1, steps=4, back=0)], interval=1)
    owned = {i for step in trajectory.steps[:2] for i in step.outputs[0]["samples"][1]}
    dropped = min(set(range(10)) - owned)
    (said,) = sample_faults(with_outputs(trajectory, 1, padding=[dropped]))
    assert said == f"epoch 0: sample {dropped} fills a batch up, and no rank owns it"


def test_a_skipped_sample_counts_as_consumed_and_cannot_be_used_too() -> None:
    sampler = ShuffleSampler(num_samples=8, seed=3, batch_size=4)
    trajectory = run(sampler, [Attempt(ranks=1, steps=3, back=0)], interval=1)
    epoch, samples = trajectory.steps[0].outputs[0]["samples"]
    skipped = {"samples": [epoch, samples[1:]], "skipped": samples[:1]}
    assert list(sample_faults(with_outputs(trajectory, 0, **skipped))) == []
    left_out = {"samples": [epoch, samples[1:]]}
    assert "only 7 of 8" in next(sample_faults(with_outputs(trajectory, 0, **left_out)))
    twice = {"skipped": samples[:1]}
    assert "consumed 2 times" in next(sample_faults(with_outputs(trajectory, 0, **twice)))
