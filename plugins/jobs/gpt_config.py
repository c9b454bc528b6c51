"""What the bundled GPT can be asked for; checked without torch, before anything is launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from seatrial.chaos.errors import UsageError
from seatrial.recovery.errors import TopologyError
from seatrial.recovery.topology import Topology

from .options import parse_options


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes and hyperparameters; ``text`` is a path, empty for CPython's own documentation.

    ``batch`` and ``samples`` count windows over all ranks, ``warmup`` and ``decay_steps`` optimizer
    steps. ``augment`` is the probability that a window gets one random byte.
    """

    width: int = 32
    layers: int = 2
    heads: int = 2
    context: int = 16
    dropout: float = 0.1
    tied: bool = True
    text: str = ""
    samples: int = 150
    batch: int = 16
    accumulation: int = 2
    augment: float = 0.5
    lr: float = 3e-3
    warmup: int = 4
    decay_steps: int = 40
    weight_decay: float = 0.1
    clip: float = 1.0
    amp: bool = True
    init_scale: float = 2.0**10
    growth_interval: int = 4


def strategy_of(topology: str) -> str:
    """``dp`` or ``fsdp``: how the model is distributed over the ranks.

    Raises:
        TopologyError: the topology has another dimension, or both.
    """
    sizes = Topology.parse(topology).sizes
    used = [name for name, size in sizes if size > 1] or [sizes[0][0]]
    if len(used) != 1 or used[0] not in ("dp", "fsdp"):
        raise TopologyError(f"the job gpt runs on dpN (DDP) or fsdpN (FSDP2), not on {topology}")
    return used[0]


def check(options: Mapping[str, object], topology: str) -> None:
    """Raise `UsageError` for options or a topology that the job does not take."""
    parse_options(GPTConfig, options, job="gpt")
    try:
        strategy_of(topology)
    except TopologyError as error:
        raise UsageError(str(error)) from None
