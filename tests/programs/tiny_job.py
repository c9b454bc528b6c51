"""A very small job with every kind of state, and with one bug of your choice.

Data parallel by hand (gradients are summed with an all-reduce), so that a run takes milliseconds.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from seatrial.plugins.jobs.options import parse_options
from seatrial.plugins.jobs.protocol import StepReport
from seatrial.recovery.sampler import ShuffleSampler, rank_share
from seatrial.recovery.state import TrainingState


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    bug: str = ""
    pause_s: float = 0.0
    log: str = ""
    tail: str = "partial"


class TinyJob:
    """``bug`` is one of those that `build` and `step` look for, none by default; every rank that
    is built adds a line to the file ``log``."""

    samples_per_epoch = 12

    def __init__(self, **options: object) -> None:
        self.config = parse_options(TinyConfig, options, job="tiny")
        self.bug = self.config.bug

    def build(self, context: Any) -> TrainingState:
        if self.config.log:
            with open(self.config.log, "a") as log:
                log.write(f"{context.rank} {context.attempt}\n")
        if self.bug == "crashes":
            raise RuntimeError("the data set is not where it was")
        if self.bug == "never syncs":
            os.fsync = lambda _: None  # type: ignore[assignment]
        torch.manual_seed(context.seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        if self.bug == "own parameters":
            # Each rank trains weights of its own, as tensor parallelism does, under one name.
            torch.manual_seed(context.seed + 1 + context.rank)
            self.model.append(nn.Linear(1, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 1 / (1 + step)
        )
        if self.bug == "forgets an average":
            self.kept = {"average": AveragedModel(self.model)}
        if self.bug == "forgets a sparse table":
            self.table = torch.nn.Module()
            self.table.register_buffer("rows", torch.eye(2).to_sparse())
        if self.bug == "forgets the scaler":
            self.scaler = torch.amp.GradScaler("cpu", growth_interval=2)
        self.sampler = ShuffleSampler(num_samples=12, seed=context.seed, batch_size=4)
        self.noise = torch.Generator().manual_seed(context.seed + context.rank)
        torch.manual_seed(context.seed + context.rank)
        if self.bug == "leaks a process":
            subprocess.Popen(["sleep", "3600"], start_new_session=True).returncode = 0
        if self.bug == "leaks a file":
            tempfile.mkstemp()
        return TrainingState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=None if self.bug == "forgets the scheduler" else self.scheduler,
            sampler=None if self.bug == "forgets the sampler" else self.sampler,
            generators={} if self.bug == "forgets a random stream" else {"noise": self.noise},
            seed=context.seed,
        )

    def step(self, context: Any) -> StepReport:
        time.sleep(self.config.pause_s)
        try:
            return self._step(context)
        except RuntimeError:
            if self.bug != "swallows exceptions":
                raise
            return self._step(context)

    def _step(self, context: Any) -> StepReport:
        with context.phase("data"):
            state = self.sampler.state_dict()
            epoch, batch = self.sampler.next_batch()
            if self.bug == "consumes samples twice":
                self.sampler.load_state_dict(state)
            mine = rank_share(batch, rank=context.rank, world_size=context.world_size)
            inputs = torch.stack([torch.arange(4.0) * float(i) / 12 for i in mine])
        with context.phase("forward"):
            if self.bug == "depends on time":
                inputs = inputs + time.time_ns() % 1000 / 1000
            if self.bug == "depends on the process":
                torch.manual_seed(os.getpid())
            noisy = inputs + 0.1 * torch.randn(inputs.shape, generator=self.noise)
            if self.bug == "asks the attempt":
                noisy = noisy * context.attempt
            loss = self.model(noisy).square().sum() / len(batch)
        with context.phase("backward"):
            self.optimizer.zero_grad()
            torch.autograd.backward(loss)
            for parameter in self.model.parameters():
                if self.bug != "own parameters" or parameter.numel() > 1:
                    dist.all_reduce(parameter.grad)
        with context.phase("optimizer"):
            self.optimizer.step()
            self.scheduler.step()
            if self.bug == "forgets an average":
                self.kept["average"].update_parameters(self.model)
            if self.bug == "forgets the scaler":
                self.scaler.scale(loss.detach())
                self.scaler.update(self.scaler.get_scale() * 2)
            total = loss.detach().clone()
            dist.all_reduce(total)
        return StepReport(loss=float(total), epoch=epoch, samples=mine.tolist(), tokens=len(batch))


def records_nothing(context: Any, arguments: dict[str, Any]) -> None:
    """An entry that trains, perhaps, but leaves no evidence."""
