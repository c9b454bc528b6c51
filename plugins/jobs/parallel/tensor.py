"""Tensor parallelism: attention heads and MLP columns spread over ranks by ``parallelize_module``.

Embedding, norms, output weights and mixtures of experts stay whole on every rank, and so do the
hidden states between blocks, which is where dropout draws: no mask is ever drawn for a shard.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from ..model import GPT


def over_tensor_ranks(model: GPT, mesh: DeviceMesh) -> None:
    """Shard every block in place over a 1-D mesh."""
    for block in model.blocks():
        plan: dict[str, ParallelStyle] = {
            "query_key_value": ColwiseParallel(),
            "attention_output": RowwiseParallel(),
        }
        if block.mixture is None:
            plan |= {"mlp_up": ColwiseParallel(), "mlp_down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
