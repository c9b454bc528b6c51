"""A small job whose samples are records of a file, each with a digest, with one bug of choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from summed_update import summed_update
from torch import nn

from seatrial.plugins.jobs.options import parse_options
from seatrial.plugins.jobs.protocol import StepReport
from seatrial.plugins.jobs.records import RecordFile
from seatrial.recovery.sampler import ShuffleSampler
from seatrial.recovery.state import TrainingState

SAMPLES, BATCH = 12, 4


@dataclass(frozen=True, kw_only=True)
class RecordsConfig:
    path: str
    damaged: str = "stop"
    bug: str = ""


class RecordsJob:
    """``bug`` "says nothing" does not report what it skips, "trusts a restart" looks at no digest
    once it has been restarted, "trusts all" looks at none at all."""

    samples_per_epoch = SAMPLES

    def __init__(self, **options: object) -> None:
        self.config = parse_options(RecordsConfig, options, job="records")

    def build(self, context: Any) -> TrainingState:
        torch.manual_seed(context.seed)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.sampler = ShuffleSampler(num_samples=SAMPLES, seed=context.seed, batch_size=BATCH)
        self.records = RecordFile(self.config.path, damaged=self.config.damaged)
        restarted = self.config.bug == "trusts a restart" and context.attempt > 1
        if restarted or self.config.bug == "trusts all":
            self.records._digests = [_Any() for _ in self.records._digests]  # type: ignore[misc]
        return TrainingState(
            model=self.model, optimizer=self.optimizer, sampler=self.sampler, seed=context.seed
        )

    def step(self, context: Any) -> StepReport:
        with context.phase("data"):
            share = self.sampler.next_share(rank=context.rank, world_size=context.world_size)
            read = {number: self.records.read(number) for number in share.samples}
            used = {number: data for number, data in read.items() if data is not None}
            skipped = [number for number in read if number not in used]
        inputs = torch.tensor([list(data) for data in used.values()]).reshape(-1, 4) / 256
        loss = summed_update(context, self.model, self.optimizer, inputs, batch=BATCH)
        return StepReport(
            loss=loss,
            epoch=share.epoch,
            samples=[*used],
            skipped=[] if self.config.bug == "says nothing" else skipped,
        )


class _Any(str):
    """Equal to every digest."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False
