"""A DDP job that may restart on another number of ranks, with one bug of your choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from bucket_trap_job import BucketTrapJob

from seatrial.plugins.jobs.protocol import StepReport
from seatrial.recovery.state import TrainingState


class ForgetfulState(TrainingState):
    """Restores everything on as many ranks as saved, and all but the sampler on any other.

    With ``only_back`` it forgets only what one rank saved.
    """

    only_back = False

    def load_objects(
        self, shared: Mapping[str, object], ranks: Mapping[int, Mapping[str, object]], rank: int
    ) -> None:
        changed = len(ranks) != dist.get_world_size()
        if self.only_back:
            changed = changed and len(ranks) == 1
        self._load_objects(shared, ranks, rank, omitted={"sampler"} if changed else set())


class Budget:
    """A component that starts anew, by its own code, where the number of ranks is another."""

    def __init__(self) -> None:
        self.left, self.ranks = 1000, dist.get_world_size()

    def state_dict(self) -> dict[str, int]:
        return {"left": self.left}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.left = state["left"] if self.ranks == 2 else 1000


class ReshardingJob(BucketTrapJob):
    """``bug`` is "", "forgets the sampler elsewhere" or "coming back", "has a stream of its own",
    or "has a budget" that its own code loses elsewhere."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.own_bug, self.bug = self.bug, "settles"

    def build(self, context: Any) -> TrainingState:
        super().build(context)
        make = ForgetfulState if "forgets" in self.own_bug else TrainingState
        stream = {}
        if "stream" in self.own_bug:
            noise = stream["noise"] = torch.Generator().manual_seed(context.rank)
            self.model.register_forward_pre_hook(
                lambda _, inputs: (inputs[0] + 0.1 * torch.randn(4, generator=noise),)
            )
        self.budget = Budget()
        state = make(
            model=self.model,
            optimizer=self.optimizer,
            sampler=self.sampler,
            generators=stream,
            extra={"budget": self.budget} if "budget" in self.own_bug else {},
            seed=context.seed,
        )
        if isinstance(state, ForgetfulState):
            state.only_back = "coming back" in self.own_bug
        return state

    def step(self, context: Any) -> StepReport:
        self.budget.left -= 1
        return super().step(context)
