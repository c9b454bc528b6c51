"""What a rank is told about itself, the same under every launcher."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from seatrial.recovery.collectives.observer import Observer
from seatrial.recovery.probe import around

from ..trace import TraceWriter

PHASES = ("data", "forward", "backward", "optimizer", "checkpoint", "restore")
"""The phases of a training step at which a fault may strike."""


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """One rank of one attempt. The default process group exists when a job sees this.

    ``attempt`` counts from 1. ``store`` is the checkpoint store's directory, the same for every
    attempt of a run. ``directory`` is this attempt's own and is removed after the run.
    ``observer`` sees all collectives of this rank.
    """

    rank: int
    world_size: int
    local_rank: int
    node: int
    attempt: int
    seed: int
    topology: str
    device: torch.device
    store: str
    directory: Path
    timeout_s: float
    trace: TraceWriter
    observer: Observer

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Mark the body as one phase of the current step; faults strike at its edges.

        Raises:
            ValueError: the name is not one of `PHASES`.
        """
        if name not in PHASES:
            raise ValueError(f"unknown phase {name!r}; the phases are {', '.join(PHASES)}")
        return around(name)
