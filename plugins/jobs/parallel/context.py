"""Context parallelism: every rank has some positions of each window, and sees all keys and values.

The all-gather form, from functional collectives: what ``context_parallel`` of torch does needs the
fused CUDA attention kernels. Its backward sums the gradients of keys and values over the ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_single_autograd
from torch.distributed.device_mesh import DeviceMesh

from ..model import GPT, causal_attention


def over_positions(model: GPT, mesh: DeviceMesh, *, context: int) -> slice:
    """Make every block attend across a 1-D mesh; returns this rank's positions of a window."""
    mine = context // mesh.size()
    model.first_position = mesh.get_local_rank() * mine
    attend = GatheredAttention(mesh.get_group(), start=model.first_position)
    for block in model.blocks():
        block.attend = attend
    return slice(model.first_position, model.first_position + mine)


class GatheredAttention:
    """Causal attention of the queries from position ``start`` to the positions of all ranks."""

    def __init__(self, group: dist.ProcessGroup, *, start: int) -> None:
        self._group = group
        self._start = start

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return causal_attention(
            query, self._gathered(key), self._gathered(value), start=self._start
        )

    def _gathered(self, part: torch.Tensor) -> torch.Tensor:
        # gloo ignores strides, and a cut of the fused projection has them.
        whole: torch.Tensor = all_gather_single_autograd(part.contiguous(), 2, self._group)
        return whole
