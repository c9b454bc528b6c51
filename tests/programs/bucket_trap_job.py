"""A small DDP job as many are written: everything is saved, and nothing settles DDP's buckets."""

from __future__ import annotations

from typing import Any

import torch
from tiny_job import TinyConfig
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from seatrial.plugins.jobs.options import parse_options
from seatrial.plugins.jobs.protocol import StepReport
from seatrial.recovery.sampler import ShuffleSampler
from seatrial.recovery.state import TrainingState


class Net(nn.Module):
    """Uses its layers in another order than it has them, so that DDP has something to regroup."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(24, 1)
        self.first = nn.Linear(4, 24)
        self.middle = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        return out


class BucketTrapJob:
    """``bug`` "" has the trap, "settles" throws two steps away first, "looks for unused" looks for
    unused parameters. An epoch has 44 samples in batches of 8, and the ``tail`` of its options."""

    def __init__(self, **options: object) -> None:
        config = parse_options(TinyConfig, options, job="trap")
        self.bug, self.tail = config.bug, config.tail

    def build(self, context: Any) -> TrainingState:
        torch.manual_seed(context.seed)
        self.inputs = torch.randn(44, 4)
        looks = self.bug == "looks for unused"
        self.model = DistributedDataParallel(Net(), find_unused_parameters=looks)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.sampler = ShuffleSampler(
            num_samples=44, seed=context.seed, batch_size=8, tail=self.tail
        )
        self.samples_per_epoch = self.sampler.samples_per_epoch
        for _ in range(2 if self.bug == "settles" else 0):
            torch.autograd.backward(self.model(self.inputs[:2]).sum())
        self.optimizer.zero_grad()
        return TrainingState(
            model=self.model, optimizer=self.optimizer, sampler=self.sampler, seed=context.seed
        )

    def step(self, context: Any) -> StepReport:
        with context.phase("data"):
            share = self.sampler.next_share(rank=context.rank, world_size=context.world_size)
        with context.phase("forward"):
            loss = (self.model(self.inputs[share.indices]) - 1).square().mean()
        with context.phase("backward"):
            torch.autograd.backward(loss)
        with context.phase("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        # Each rank's own loss: nothing hides or repeats a difference of the parameters.
        return StepReport(
            loss=float(loss), epoch=share.epoch, samples=share.samples, padding=share.padding
        )
