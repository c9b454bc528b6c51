"""A DDP job that may restart on another number of ranks, with one bug of your choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from bucket_trap_job import BucketTrapJob

from seatrial.recovery.state import TrainingState


class ForgetfulState(TrainingState):
    """Restores everything on as many ranks as saved, and all but the sampler on any other."""

    def load_objects(
        self, shared: Mapping[str, object], ranks: Mapping[int, Mapping[str, object]], rank: int
    ) -> None:
        changed = len(ranks) != dist.get_world_size()
        self._load_objects(shared, ranks, rank, omitted={"sampler"} if changed else set())


class ReshardingJob(BucketTrapJob):
    """``bug`` is "", "forgets the sampler elsewhere", or "has a stream of its own"."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.own_bug, self.bug = self.bug, "settles"

    def build(self, context: Any) -> TrainingState:
        super().build(context)
        make = ForgetfulState if "elsewhere" in self.own_bug else TrainingState
        stream = {"noise": torch.Generator()} if "stream" in self.own_bug else {}
        return make(
            model=self.model,
            optimizer=self.optimizer,
            sampler=self.sampler,
            generators=stream,
            seed=context.seed,
        )
