"""Verifies on one rank that a restored state equals the saved one and continues as it would have.

Does not verify what is refused, see `test_state_refusals`; nor wrappers and shards over several
ranks, see tests/jobs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from seatrial.recovery.checkpointable import TensorFacts
from seatrial.recovery.plain import dumps
from seatrial.recovery.rng import seed_everything
from seatrial.recovery.state import TrainingState

from .small_run import Net, Run, components_that_differ, restore, run_after, save


def test_tensors_have_the_names_of_the_model() -> None:
    names = set(Run().state.tensors())
    assert names == {
        "model/embedding.weight",
        "model/module.0.weight", "model/module.0.bias",
        "model/module.1.weight", "model/module.1.bias",
        "model/module.1.running_mean", "model/module.1.running_var",
        "model/module.1.num_batches_tracked",
        "average/weight", "average/bias",
    }  # fmt: skip


def test_optimizer_tensors_are_the_live_ones() -> None:
    run = run_after(1)
    tensors = run.state.tensors()
    live = run.optimizer.state[run.model.embedding.weight]
    assert tensors["optimizer/embedding.weight/exp_avg"] is live["exp_avg"]
    assert tensors["optimizer/embedding.weight/step"] is live["step"]


def test_segments_that_wrappers_insert_are_not_part_of_a_name() -> None:
    wrapper = nn.Module()
    wrapper._orig_mod = nn.Linear(2, 2)
    outer = nn.Module()
    outer.inner = wrapper
    assert set(TrainingState(model=outer).tensors()) == {"model/inner.weight", "model/inner.bias"}


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adafactor, torch.optim.Rprop])
@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("built", [0, 2])
def test_a_restored_run_equals_the_saved_one_and_continues_bitwise(
    before: int, built: int, make: Callable[..., torch.optim.Optimizer]
) -> None:
    run = run_after(before, make)
    saved = save(run.state)
    seed_everything(99, 0)
    other = run_after(built, make)
    restore(other.state, saved)
    restore(run.state, saved)
    assert components_that_differ(run.state, other.state) == []
    # One after the other, because both draw from this process's streams.
    expected = [run.step() for _ in range(4)]
    end = save(run.state)
    restore(other.state, saved)
    assert [other.step() for _ in range(4)] == expected
    restore(run.state, end)
    assert components_that_differ(run.state, other.state) == []


def test_sgd_with_momentum_of_none_is_restored() -> None:
    def make(groups: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=lr)

    run = run_after(2, make)
    other = Run(make)
    restore(other.state, save(run.state))
    assert components_that_differ(run.state, other.state) == []


def test_a_fresh_optimizer_takes_the_place_of_one_that_has_stepped() -> None:
    fresh = save(Run().state)
    run = run_after(2)
    restore(run.state, fresh)
    assert len(run.optimizer.state) == 0


def test_step_counts_stay_on_the_cpu_and_moments_have_the_parameters_layout() -> None:
    saved = save(run_after(1).state)
    other = Run()
    restore(other.state, saved)
    state = other.optimizer.state[other.model.embedding.weight]
    assert state["step"].shape == ()
    assert state["exp_avg"].shape == other.model.embedding.weight.shape
    assert not state["exp_avg"].requires_grad


def test_step_counts_of_parameters_elsewhere_stay_on_the_cpu_as_torch_keeps_them() -> None:
    model = nn.Linear(2, 2, device="meta")
    state = TrainingState(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    scalar, matrix = ((), (2, 2))
    state.prepare(
        {
            "optimizer/weight/step": TensorFacts(dtype=torch.float32, shape=scalar),
            "optimizer/weight/exp_avg": TensorFacts(dtype=torch.float32, shape=matrix),
        }
    )
    tensors = state.tensors()
    assert tensors["optimizer/weight/step"].device.type == "cpu"
    assert tensors["optimizer/weight/exp_avg"].device.type == "meta"


def test_learning_rates_are_those_that_were_saved() -> None:
    run = run_after(3)
    assert run.state.learning_rates() == pytest.approx([0.00001, 0.00001])
    other = Run()
    restore(other.state, save(run.state))
    assert other.state.learning_rates() == run.state.learning_rates()
    assert other.scheduler.milestones == run.scheduler.milestones
    assert type(other.scheduler.milestones) is type(run.scheduler.milestones)


def test_a_scaler_restored_before_its_first_use_has_the_saved_scale() -> None:
    run = run_after(3)
    other = Run()
    restore(other.state, save(run.state))
    assert other.state.loss_scale() == run.state.loss_scale() == 16.0
    assert json.loads(json.dumps(other.scaler.state_dict())) == run.scaler.state_dict()
    other.scaler.scale(torch.zeros(1))
    assert other.scaler.state_dict() == run.scaler.state_dict()


def test_a_state_without_a_scaler_has_no_loss_scale() -> None:
    assert TrainingState(model=Net()).loss_scale() is None


def test_what_was_captured_does_not_change_with_later_steps() -> None:
    class History:
        def __init__(self) -> None:
            self.stages = [1]

        def state_dict(self) -> Any:
            return {"stages": self.stages}

        def load_state_dict(self, state: Any) -> None:
            self.stages = state["stages"]

    history = History()
    shared = TrainingState(model=Net(), extra={"history": history}).shared_objects()
    history.stages.append(2)
    assert shared["history"] == {"stages": [1]}


COMPONENTS = (
    "model", "optimizer", "scheduler", "scaler", "rng", "sampler", "progress",
    "curriculum", "average",
)  # fmt: skip


def test_components_are_those_that_are_present() -> None:
    assert Run().state.components() == COMPONENTS
    assert TrainingState(model=Net()).components() == ("model", "rng", "progress")


@pytest.mark.parametrize("name", COMPONENTS)
def test_omitting_a_component_leaves_exactly_that_one_behind(name: str) -> None:
    run = run_after(3)
    saved = save(run.state)
    seed_everything(1, 1)
    other = Run()
    restore(other.state.omitting([name]), saved)
    # Python's and torch's streams belong to the process; for "rng" only the named stream differs.
    assert components_that_differ(run.state, other.state) == [name]


def test_an_omitted_optimizer_asks_only_for_what_is_stored_and_keeps_what_it_has() -> None:
    fresh = save(Run().state)
    run = run_after(2)
    moment = run.optimizer.state[run.model.embedding.weight]["exp_avg"].clone()
    restore(run.state.omitting(["optimizer"]), fresh)
    assert torch.equal(run.optimizer.state[run.model.embedding.weight]["exp_avg"], moment)


def test_the_rng_is_restored_after_everything_that_could_draw() -> None:
    run = run_after(1)
    saved = save(run.state)
    restore(run.state, saved)  # Curriculum.load_state_dict draws
    assert dumps(run.state.rank_objects()) == dumps(saved[2])


def test_a_rank_that_did_not_save_gets_derived_rng_and_a_note() -> None:
    run = run_after(2)
    saved = save(run.state)
    drawn = []
    for rank in (2, 3, 2):
        restore(run.state, saved, rank=rank, ranks=2)
        drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[2] != drawn[1]
    assert "rank 2: the checkpoint of step 2 holds no RNG state for python" in run.state.notes[0]


def test_several_optimizers_and_schedulers_are_kept_apart() -> None:
    def build() -> tuple[TrainingState, Mapping[str, torch.optim.Optimizer]]:
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        optimizers = {n: torch.optim.Adam(m.parameters(), lr=0.1) for n, m in model.items()}
        schedulers = {n: torch.optim.lr_scheduler.StepLR(o, 1) for n, o in optimizers.items()}
        state = TrainingState(model=model, optimizer=optimizers, scheduler=schedulers)
        return state, optimizers

    state, optimizers = build()
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers["a"].step()
    assert "optimizer/a/a.weight/exp_avg" in state.tensors()
    other, _ = build()
    restore(other, save(state))
    assert components_that_differ(state, other) == []
    assert state.components() == ("model", "optimizer", "scheduler", "rng", "progress")


def test_state_that_modules_keep_besides_tensors_is_restored() -> None:
    class Counting(nn.Linear):
        calls = 0

        def get_extra_state(self) -> int:
            return self.calls

        def set_extra_state(self, state: int) -> None:
            self.calls = state

    saved, restored = Counting(2, 2), Counting(2, 2)
    saved.calls = 7
    state = TrainingState(model=nn.Sequential(saved))
    restore(TrainingState(model=nn.Sequential(restored)), save(state))
    assert restored.calls == 7


def test_capturable_optimizers_get_tensor_learning_rates_back_in_place() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))
    state = TrainingState(model=model, optimizer=optimizer)
    saved = save(state)
    live = optimizer.param_groups[0]["lr"]
    live.fill_(0.25)
    restore(state, saved)
    assert optimizer.param_groups[0]["lr"] is live
    assert state.learning_rates() == [0.5]
