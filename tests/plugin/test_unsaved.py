"""Verifies which objects of a job are found to carry state that its `TrainingState` does not hold,
and that what it holds, under whatever wrapper, is not among them. That a restart which loses one is
DIVERGED is verified in tests/chaos/test_trials.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

from seatrial.plugins.jobs.unsaved import Unsaved
from seatrial.recovery.sampler import ShuffleSampler
from seatrial.recovery.state import TrainingState


class Parts:
    """A model, its optimizer and a scheduler of schedulers, held by the state."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = lr_scheduler.StepLR(self.optimizer, 3)
        self.scaler = torch.amp.GradScaler("cpu")
        self.train()

    def train(self) -> None:
        self.model(torch.ones(3, 2)).sum().backward()
        self.optimizer.step()
        self.scheduler.step()

    def state(self) -> TrainingState:
        return TrainingState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            sampler=ShuffleSampler(num_samples=4, batch_size=2, seed=0),
        )


@pytest.fixture
def parts() -> Parts:
    return Parts()


def found(parts: Parts, **attributes: Any) -> dict[str, str]:
    return Unsaved(SimpleNamespace(**attributes), parts.state(), rank=0)()


def test_what_the_state_holds_is_not_found_under_any_name(parts: Parts) -> None:
    wrapped = nn.Module()
    wrapped.inner = parts.model
    inside = parts.model[0]
    assert found(parts, wrapped=wrapped, inside=inside, held=parts, loss=nn.MSELoss()) == {}


def test_every_kind_of_object_is_found_wherever_the_job_keeps_it(parts: Parts) -> None:
    other = Parts()
    attributes = {
        "average": AveragedModel(parts.model),
        "trainer": SimpleNamespace(optimizers=[other.optimizer], plan={"warm/up": other.scheduler}),
        "heads": {
            "a/b": nn.Linear(1, 1),
            object(): nn.Linear(1, 1),
        },  # that key has no lasting name
        "scaler": torch.amp.GradScaler("cpu"),
    }
    names = {"average", "trainer.optimizers[0]", "trainer.plan['warm/up']", "scaler"}
    names.add("heads['a/b']")
    assert set(found(parts, **attributes)) == names


@pytest.mark.parametrize("kind", ["model", "buffer", "optimizer", "scheduler", "scaler"])
def test_its_fingerprint_changes_with_its_state_and_only_with_it(parts: Parts, kind: str) -> None:
    other = Parts()
    job = SimpleNamespace(other=getattr(other, "model" if kind == "buffer" else kind))
    unsaved = Unsaved(job, parts.state(), rank=0)
    before = unsaved()
    assert unsaved() == before
    with torch.no_grad():
        if kind == "model":
            other.model[0].weight[0, 0] += 1
        elif kind == "buffer":
            other.model[1].running_mean[0] += 1
        elif kind == "optimizer":
            next(iter(other.optimizer.state.values()))["exp_avg"][0] += 1
        elif kind == "scheduler":
            other.scheduler.last_epoch += 1
        else:
            other.scaler.load_state_dict({**other.scaler.state_dict(), "growth_factor": 3.0})
    assert set(unsaved()) == {"other"}
    assert unsaved() != before


def test_an_object_that_comes_later_is_found(parts: Parts) -> None:
    job = SimpleNamespace(best=None)
    unsaved = Unsaved(job, parts.state(), rank=0)
    assert unsaved() == {}
    job.best = Parts().model
    assert set(unsaved()) == {"best"}


def test_what_the_job_says_need_not_come_back_is_left_out(parts: Parts) -> None:
    trainer = SimpleNamespace(meter=nn.Linear(1, 1), average=nn.Linear(1, 1))
    assert set(found(parts, trainer=trainer, unsaved=("trainer.meter",))) == {"trainer.average"}
    assert set(found(parts, trainer=trainer, unsaved="trainer.meter")) == {"trainer.average"}


def test_attributes_that_lead_to_themselves_and_tensors_that_cannot_be_read_are_no_trouble(
    parts: Parts,
) -> None:
    loop = SimpleNamespace()
    loop.loop = loop
    sparse = nn.Module()
    sparse.register_buffer("table", torch.eye(2).to_sparse())
    with torch.device("meta"):
        planned = nn.Linear(2, 2)
    job = SimpleNamespace(loop=loop, sparse=sparse, planned=planned, lazy=nn.LazyLinear(2))
    unsaved = Unsaved(job, parts.state(), rank=0)
    assert unsaved() == {}
    assert unsaved.unread() == {
        "sparse/table": "it is a torch.sparse_coo tensor of torch.float32",
        "planned/weight": "it is on the device meta",
        "planned/bias": "it is on the device meta",
        "lazy/weight": "it has no shape yet",
        "lazy/bias": "it has no shape yet",
    }
    job.lazy(torch.ones(1, 3))
    assert set(unsaved()) == {"lazy"}
    assert unsaved.unread() == {}  # each is told once


def test_an_object_that_is_no_plain_data_is_named(parts: Parts) -> None:
    scheduler = lr_scheduler.LambdaLR(parts.optimizer, lambda step: 1.0)
    scheduler.seen = object()
    unsaved = Unsaved(SimpleNamespace(schedule=scheduler), parts.state(), rank=0)
    assert unsaved() == {}
    ((name, why),) = unsaved.unread().items()
    assert name == "schedule"
    assert "object" in why
