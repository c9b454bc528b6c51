"""A job with every kind of state that is easily forgotten, and one piece to forget of your choice.

Three optimizers with groups and schedulers of their own, one of them with ``last_epoch``; a
parameter that is frozen from the start, one that is frozen in step `FROZEN_FROM`, one that never
has a gradient; a grad scaler that skips step `OVERFLOWS_AT`, because of one rank; a gradient that
is carried from step to step; batch norm; an average of the weights; micro-batches; an uneven tail.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from seatrial.plugins.jobs.options import parse_options
from seatrial.plugins.jobs.protocol import StepReport
from seatrial.recovery.buffers import settle_buffers
from seatrial.recovery.checkpointable import TensorFacts
from seatrial.recovery.sampler import ShuffleSampler, rank_share
from seatrial.recovery.state import TrainingState

SAMPLES, BATCH = 41, 16  # batches of 16, 16 and 9, of which rank 0 has 5
FROZEN_FROM, OVERFLOWS_AT = 4, 3


@dataclass(frozen=True, kw_only=True)
class TraitsConfig:
    forget: str = ""
    bug: str = ""


class ForgetfulState(TrainingState):
    """Restores everything but what is named ``forget…``, which stays as the job built it."""

    forget = ""

    def prepare(self, stored: Mapping[str, TensorFacts]) -> None:
        self._kept = {name: tensor.clone() for name, tensor in self.tensors().items()}
        self._kept_objects = {
            name: copy.deepcopy(component.state_dict())
            for name, component in self.stateful().items()
            if name.startswith(self.forget)
        }
        super().prepare(stored)

    @torch.no_grad()
    def load_objects(self, *arguments: Any) -> None:
        super().load_objects(*arguments)
        for name, tensor in self.tensors().items():
            if name.startswith(self.forget):
                tensor.copy_(self._kept[name]) if name in self._kept else tensor.zero_()
        for name, state in self._kept_objects.items():
            self.stateful()[name].load_state_dict(state)


class Net(nn.Module):
    """``spare`` is in no output."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 6)
        self.early = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.spare = nn.Linear(6, 1)
        self.head = nn.Linear(6, 1, bias=False)
        self.offset = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.tanh(self.early(torch.tanh(self.frozen(x)))))
        out: torch.Tensor = self.head(x) + self.offset
        return out


class Carried:
    """A gradient that the next steps add to, as a component."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    def state_dict(self) -> dict[str, torch.Tensor]:
        gradient = self._parameter.grad
        return {} if gradient is None else {"offset": gradient.clone()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._parameter.grad = state["offset"].clone() if state else None


class TraitsJob:
    """``forget`` begins the names that a restore leaves out, ``bug`` is one that is looked for."""

    samples_per_epoch = SAMPLES

    def __init__(self, **options: object) -> None:
        config = parse_options(TraitsConfig, options, job="traits")
        self.forget, self.bug = config.forget, config.bug

    def build(self, context: Any) -> TrainingState:
        torch.manual_seed(context.seed)
        net = Net()
        self.inputs = torch.randn(SAMPLES, 4)
        net.frozen.requires_grad_(False)
        if self.bug == "builds anew":  # as one does who knows that a checkpoint follows
            nn.init.zeros_(net.frozen.weight)
        self.net = net
        own = self.bug == "keeps statistics of its own"
        self.model = DistributedDataParallel(
            net, find_unused_parameters=True, broadcast_buffers=not own
        )
        inner = [*net.frozen.parameters(), *net.early.parameters()]
        outer = [*net.norm.parameters(), *net.spare.parameters()]
        self.body = torch.optim.AdamW(
            [{"params": inner, "weight_decay": 0.1}, {"params": outer, "weight_decay": 0.0}], lr=0.1
        )
        self.head = torch.optim.SGD(net.head.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        self.offset = torch.optim.Adam([{"params": [net.offset], "lr": 0.1, "initial_lr": 0.1}])
        warm = lr.LinearLR(self.body, total_iters=2)
        stairs = lr.MultiStepLR(self.body, milestones=[1, 1, 3], gamma=0.5)
        self.schedulers = {
            "body": lr.SequentialLR(self.body, [warm, stairs], milestones=[2]),
            "head": lr.ChainedScheduler(
                [lr.ConstantLR(self.head, total_iters=3), lr.ExponentialLR(self.head, gamma=0.9)]
            ),
            "offset": lr.LambdaLR(self.offset, lambda step: 1 / (1 + step), last_epoch=2),
        }
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
        self.sampler = ShuffleSampler(num_samples=SAMPLES, seed=context.seed, batch_size=BATCH)
        self.average = AveragedModel(
            net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True
        ).requires_grad_(False)
        torch.manual_seed(context.seed + context.rank)
        make = ForgetfulState if self.forget else TrainingState
        self.state = make(
            model=self.model,
            optimizer={"body": self.body, "head": self.head, "offset": self.offset},
            scheduler=self.schedulers,
            scaler=self.scaler,
            sampler=self.sampler,
            extra={"average": self.average, "carried": Carried(net.offset)},
            seed=context.seed,
        )
        if isinstance(self.state, ForgetfulState):
            self.state.forget = self.forget
        return self.state

    def step(self, context: Any) -> StepReport:
        number = self.state.progress.step + 1
        if number == FROZEN_FROM or (number > FROZEN_FROM and self.bug != "freezes once"):
            self.net.early.requires_grad_(False)
        if self.bug == "touches the spare":
            self._touch_the_spare()
        with context.phase("data"):
            epoch, batch = self.sampler.next_batch()
            mine = rank_share(batch, rank=context.rank, world_size=context.world_size)
        total = 0.0
        for micro, part in enumerate(mine.tensor_split(2)):
            with context.phase("forward"):
                self.model.require_backward_grad_sync = micro == 1
                noisy = self.inputs[part] + 0.1 * torch.randn(len(part), 4)
                loss = (self.model(noisy) - 1).square().mean()
                total += float(loss)
            with context.phase("backward"):
                overflow = number == OVERFLOWS_AT and context.rank == 1
                scaled = self.scaler.scale(loss * (float("inf") if overflow else 1.0))
                torch.autograd.backward(scaled)
        with context.phase("optimizer"):
            self._update(number)
        return StepReport(loss=total, epoch=epoch, samples=mine.tolist(), tokens=len(batch))

    def _update(self, number: int) -> None:
        updating = [self.body, self.head]
        before = self.scaler.get_scale()
        for optimizer in updating:
            self.scaler.step(optimizer)
            optimizer.zero_grad()
        self.scaler.update()
        took = self.scaler.get_scale() >= before
        if not took:
            self.offset.zero_grad()
        elif number % 2:  # adds the gradients of two steps up, in whatever scale they had
            self.offset.step()
            self.offset.zero_grad()
        if took:
            for scheduler in self.schedulers.values():
                scheduler.step()
            settle_buffers(self.model)  # or each rank would have an average of its own
            self.average.update_parameters(self.net)

    def _touch_the_spare(self) -> None:
        """What creates an optimizer's state by a step with zero gradients does."""
        for parameter in self.net.spare.parameters():
            parameter.grad = torch.zeros_like(parameter)
        frozen = copy.deepcopy(self.body.param_groups)
        for group in self.body.param_groups:
            group["lr"] = 0.0
        self.body.step()
        for group, saved in zip(self.body.param_groups, frozen, strict=True):
            group["lr"] = saved["lr"]
        self.body.zero_grad()
