"""Verifies that a state which does not fit is refused by name, before anything changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from seatrial.recovery.errors import StateError
from seatrial.recovery.state import TrainingState

from .small_run import Curriculum, Net, Run, restore, run_after, save


def test_omitting_an_unknown_component_lists_the_valid_ones() -> None:
    with pytest.raises(StateError, match="no component 'ema'; its components are model, optimizer"):
        Run().state.omitting(["ema"])


def test_another_grouping_of_parameters_is_refused_before_anything_changes() -> None:
    saved = save(run_after(2).state)
    run = Run()
    vectors, matrices = (group["params"] for group in reversed(run.optimizer.param_groups))
    matrices.append(vectors.pop())
    with pytest.raises(StateError, match=r"group 0 .* has other members .*: module\.1\.bias"):
        restore(run.state, saved)
    assert run.state.progress.step == 0
    assert run.scheduler.last_epoch == 0


def test_another_number_of_groups_is_refused() -> None:
    saved = save(run_after(2).state)
    run = Run()
    run.optimizer.param_groups[0]["params"] += run.optimizer.param_groups.pop()["params"]
    with pytest.raises(StateError, match="has 2 parameter groups and the one here has 1"):
        restore(run.state, saved)


@pytest.mark.parametrize("change", ["missing", "left over"])
def test_components_that_do_not_match_are_refused_by_name(change: str) -> None:
    run = run_after(1)
    tensors, shared, own = save(run.state)
    if change == "missing":
        del shared["scaler"]
    else:
        shared["ema"] = {}
    with pytest.raises(StateError, match="lacks scaler" if change == "missing" else "holds ema"):
        restore(run.state, (tensors, shared, own))


def test_a_component_that_refuses_its_state_is_named() -> None:
    run = run_after(1)
    tensors, shared, own = save(run.state)
    shared["scheduler"] = 5
    with pytest.raises(StateError, match="scheduler refused the state that was saved for it"):
        restore(run.state, (tensors, shared, own))


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    stray = torch.optim.SGD([nn.Parameter(torch.zeros(7))], lr=1.0)
    with pytest.raises(StateError, match=r"shape \(7,\) that is not a parameter of the model"):
        TrainingState(model=Net(), optimizer=stray).tensors()


@pytest.mark.parametrize("name", ["model", "a/b", ""])
def test_extras_may_not_take_the_names_of_components(name: str) -> None:
    with pytest.raises(StateError, match="cannot name an extra component"):
        TrainingState(model=Net(), extra={name: Curriculum()})
