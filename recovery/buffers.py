"""Buffers that differ between the replicas of a model, such as the statistics of batch norm.

Guarantees: after `settle_buffers` every rank has the buffers that it would go on with, so that one
copy, which is what a checkpoint keeps, is enough to go on from.

Does not: average them, or look at models that DDP does not wrap: what their ranks keep for
themselves is state that no checkpoint holds.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


@torch.no_grad()
def settle_buffers(model: torch.nn.Module) -> None:
    """Give every rank rank 0's buffers now, where DDP would before the next forward pass.

    A collective over the ranks of each DDP module. Changes nothing that follows: what DDP then
    broadcasts is equal already. Does nothing where DDP would not broadcast
    (``DistributedDataParallel.will_sync_module_buffers``).
    """
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) and module.will_sync_module_buffers():
            for name, buffer in module.module.named_buffers():
                if name not in module.parameters_to_ignore:
                    dist.broadcast(buffer, group=module.process_group, group_src=0)
