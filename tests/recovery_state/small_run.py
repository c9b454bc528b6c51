"""A training program small enough to read, and a save and a restore of its state on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from seatrial.recovery.checkpointable import Checkpointable, TensorFacts
from seatrial.recovery.compare import combine, differences
from seatrial.recovery.fingerprint import fingerprint
from seatrial.recovery.plain import dumps, loads
from seatrial.recovery.sampler import ShuffleSampler
from seatrial.recovery.state import TrainingState

Saved = tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]


class Net(nn.Module):
    """Tied weights, a buffer, a buffer that is not saved, and a child that is called module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(3), persistent=False)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.module(self.embedding(index)))
        return logits


class Curriculum:
    def __init__(self) -> None:
        self.difficulty = 0

    def state_dict(self) -> dict[str, int]:
        return {"difficulty": self.difficulty}

    def load_state_dict(self, state: dict[str, int]) -> None:
        torch.rand(3)  # a restore must not care that somebody's code draws
        self.difficulty = state["difficulty"]


class Run:
    """A training program small enough to read."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        self.model = Net()
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = make(groups, lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 3, 3])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.sampler = ShuffleSampler(num_samples=6, seed=1, batch_size=4)
        self.noise = torch.Generator().manual_seed(1)
        self.curriculum = Curriculum()
        self.average = nn.Linear(2, 2)
        self.state = TrainingState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            sampler=self.sampler,
            generators={"noise": self.noise},
            extra={"curriculum": self.curriculum, "average": self.average},
        )

    def step(self) -> float:
        epoch, index = self.sampler.next_batch()
        logits = self.model(index) + torch.rand((), generator=self.noise)
        loss = nn.functional.cross_entropy(logits, index)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.curriculum.difficulty += 1
        with torch.no_grad():
            self.average.weight += loss
        self.state.progress.step += 1
        self.state.progress.epoch = epoch
        return loss.item()


def save(state: TrainingState) -> Saved:
    shared, own = (loads(dumps(o)) for o in (state.shared_objects(), state.rank_objects()))
    assert isinstance(shared, dict)
    assert isinstance(own, dict)
    return {k: v.detach().clone() for k, v in state.tensors().items()}, shared, own


def restore(state: Checkpointable, saved: Saved, *, rank: int = 0, ranks: int = 1) -> None:
    tensors, shared, own = saved
    state.prepare({k: TensorFacts(dtype=v.dtype, shape=tuple(v.shape)) for k, v in tensors.items()})
    targets = state.tensors()
    assert set(targets) == set(tensors)
    with torch.no_grad():
        for name, tensor in tensors.items():
            assert targets[name].dtype == tensor.dtype
            targets[name].copy_(tensor)
    state.load_objects(shared, dict.fromkeys(range(ranks), own), rank)


def components_that_differ(reference: TrainingState, other: TrainingState) -> list[str]:
    values = [combine([fingerprint(s, rank=0).to_json()]) for s in (reference, other)]
    return list(dict.fromkeys(found.component for found in differences(*values)))


def run_after(steps: int, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> Run:
    run = Run(make)
    for _ in range(steps):
        run.step()
    return run
