"""A job whose batches come from data-loader workers that read ahead, in three ways."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from summed_update import summed_update
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from seatrial.plugins.jobs.options import parse_options
from seatrial.plugins.jobs.protocol import StepReport
from seatrial.recovery.sampler import ShuffleSampler, rank_share
from seatrial.recovery.state import TrainingState

SAMPLES, BATCH = 22, 8  # the last batch of an epoch has 6
Entry = tuple[int, int]
"""An epoch and an index: what a loader is asked for, so that what it gives says which it is."""


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    loader: str = "upcoming"


class Squares(Dataset[tuple[Entry, float]]):
    def __getitem__(self, entry: Entry) -> tuple[Entry, float]:  # type: ignore[override]
        return entry, float(entry[1] ** 2)


class LoaderJob:
    """``loader`` is "upcoming" (the sampler's position is what was consumed), "stateful" (the
    loader itself is the state), or "runs ahead" (the bug: its workers move the sampler)."""

    samples_per_epoch = SAMPLES

    def __init__(self, **options: object) -> None:
        self.kind = parse_options(LoaderConfig, options, job="loader").loader

    def build(self, context: Any) -> TrainingState:
        torch.manual_seed(context.seed)
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-5, momentum=0.9)
        self.sampler = ShuffleSampler(num_samples=SAMPLES, seed=context.seed, batch_size=BATCH)
        self.batches: Iterator[Any] | None = None
        self.loader = self._make_loader(context)
        return TrainingState(
            model=self.model,
            optimizer=self.optimizer,
            sampler=self.loader if self.kind == "stateful" else self.sampler,
            seed=context.seed,
        )

    def _make_loader(self, context: Any) -> Any:
        kind = StatefulDataLoader if self.kind == "stateful" else DataLoader
        return kind(
            Squares(),
            batch_sampler=_Shares(self, context),
            num_workers=2,
            prefetch_factor=2,
            collate_fn=list,
            # Without one of its own, every new iterator would draw from the rank's stream.
            generator=torch.Generator().manual_seed(context.seed),
        )

    def step(self, context: Any) -> StepReport:
        with context.phase("data"):
            if self.batches is None:
                self.batches = iter(self.loader)
            batch = next(self.batches)
            if self.kind == "upcoming":
                self.sampler.next_batch()
        inputs = torch.tensor([[value] for _, value in batch]) / SAMPLES**2
        loss = summed_update(context, self.model, self.optimizer, inputs, batch=BATCH)
        samples = [index for (_, index), _ in batch]
        return StepReport(loss=loss, epoch=batch[0][0][0], samples=samples)


class _Shares:
    """This rank's part of every batch, without end; read anew from where the sampler is."""

    def __init__(self, job: LoaderJob, context: Any) -> None:
        self._job, self._context = job, context

    def __iter__(self) -> Iterator[list[Entry]]:
        sampler, context = self._job.sampler, self._context
        upcoming, runs_ahead = sampler.upcoming(), self._job.kind == "runs ahead"
        while True:
            epoch, batch = sampler.next_batch() if runs_ahead else next(upcoming)
            mine = rank_share(batch, rank=context.rank, world_size=context.world_size)
            yield [(epoch, index) for index in mine.tolist()]
