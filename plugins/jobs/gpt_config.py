"""What the bundled GPT can be asked for; checked without torch, before anything is launched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from seatrial.chaos.errors import UsageError
from seatrial.recovery.errors import TopologyError
from seatrial.recovery.topology import Topology

from .options import parse_options


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes and hyperparameters; ``text`` is a path, empty for CPython's own documentation.

    ``batch`` and ``samples`` count windows over all ranks, ``warmup`` and ``decay_steps`` optimizer
    steps. ``augment`` is the probability that a window gets one random byte. ``experts`` replaces
    every second MLP with a mixture of that many. ``amp`` is a grad scaler, and fp16 autocast on a
    GPU; on a CPU autocast is asked for with ``autocast_cpu``, as it only costs time there.
    ``bucket_mb`` is the size of DDP's gradient buckets, small enough that there are several, as in
    a large model.
    """

    width: int = 32
    layers: int = 2
    heads: int = 2
    context: int = 16
    dropout: float = 0.1
    tied: bool = True
    experts: int = 0
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
    autocast_cpu: bool = False
    init_scale: float = 2.0**10
    growth_interval: int = 4
    bucket_mb: float = 0.08

    def autocasts(self, device_type: str) -> bool:
        """Whether the forward pass on such a device runs in fp16 autocast."""
        return self.amp and (device_type != "cpu" or self.autocast_cpu)


def check_topology(config: GPTConfig, topology: Topology) -> None:
    """Whether the model can be put on a topology.

    Raises:
        TopologyError: dimensions that do not go together here, or sizes that do not divide.
    """
    for is_wrong, why in _limits(config, topology):
        if is_wrong:
            raise TopologyError(f"the job gpt cannot run on {topology}: {why}")


def _limits(config: GPTConfig, topology: Topology) -> Iterator[tuple[bool, str]]:
    size = topology.size
    tp, pp, cp, ep = size("tp"), size("pp"), size("cp"), size("ep")
    yield (
        cp > 1 and (max(tp, pp, ep) > 1 or min(size("dp"), size("fsdp")) > 1),
        "context parallelism (cp) goes with dp or with fsdp, and with nothing else",
    )
    yield (
        ep > 1 and (max(tp, pp, cp) > 1 or "fsdp" in dict(topology.sizes)),
        "expert parallelism (ep) goes with dp, and with nothing else",
    )
    yield (
        ep > 1 and (not config.experts or config.layers < 2),
        f"the model has no experts to spread; set experts={2 * ep} and at least two layers",
    )
    yield (
        config.experts % ep > 0,
        f"experts={config.experts} do not divide over {ep} ranks",
    )
    yield (
        config.heads % tp > 0,
        f"heads={config.heads} do not divide over {tp} tensor-parallel ranks",
    )
    yield config.layers < pp, f"layers={config.layers} are fewer than its {pp} stages"
    yield (
        config.accumulation < pp,
        f"a pipeline of {pp} stages needs as many micro-batches; set accumulation={pp}",
    )
    yield (
        config.context % cp > 0,
        f"context={config.context} does not divide over {cp} context-parallel ranks",
    )


def check(options: Mapping[str, object], topology: str) -> None:
    """Raise `UsageError` for options or a topology that the job does not take."""
    config = parse_options(GPTConfig, options, job="gpt")
    try:
        check_topology(config, Topology.parse(topology))
    except TopologyError as error:
        raise UsageError(str(error)) from None
