"""What is put on trial: a job, its world, and the size of its runs, as one value. Torch-free."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from .launch.launcher import HOSTS
from .launch.plan import Workload, World
from .schedule import Shape


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The job on trial and the size of its runs; what a reference is the reference of.

    ``data_faults`` is a schedule that every run meets, the reference too: its data is like that.
    ``timeout_s`` is how long no rank may do anything; None derives it from the reference.
    ``run_limit_s`` is how long a run may take with all its attempts.
    ``powerloss`` is the kind of disk that the stores are on, one of
    `seatrial.chaos.powerloss.KINDS`; empty for one that keeps its power.
    """

    workload: Workload
    world: World
    seed: int
    steps: int
    checkpoint_interval: int
    max_restarts: int = 3
    timeout_s: float | None = None
    run_limit_s: float = 3600.0
    launcher: str = "fork"
    object_store: bool = False
    powerloss: str = ""
    data_faults: str = "clean"

    @property
    def shape(self) -> Shape:
        return Shape(
            world_size=self.world.ranks,
            ranks_per_node=self.world.ranks_per_node,
            steps=self.steps,
            checkpoint_interval=self.checkpoint_interval,
            max_restarts=self.max_restarts,
            object_store=self.object_store,
            powerloss=self.powerloss,
            topology=self.world.topology,
            hosts=self.launcher == HOSTS,
        )

    @property
    def key(self) -> str:
        """Equal for experiments that have the same reference."""
        facts = asdict(self)
        for name in ("max_restarts", "timeout_s", "run_limit_s", "powerloss"):
            del facts[name]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
