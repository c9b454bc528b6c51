"""Expert parallelism: experts spread over ranks by their global index, tokens sent to and fro.

An expert's parameters are `DTensor` shards of the model's, so its name and place in a checkpoint do
not depend on where it runs. Tokens travel by ``all_to_all_single``; none is dropped.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ..model import GPT, Experts, expert_mlps


def over_expert_ranks(model: GPT, mesh: DeviceMesh) -> None:
    """Give each rank of a 1-D mesh its experts of every block, in place."""
    for mixture in model.mixtures():
        experts = mixture.experts
        for name, parameter in list(experts.named_parameters()):
            sharded = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            experts.register_parameter(name, nn.Parameter(sharded))
        experts.run = ExpertExchange(mesh.get_group(), ranks=mesh.size())


class ExpertExchange:
    """Sends each token to the rank that has its expert, and its result back."""

    def __init__(self, group: dist.ProcessGroup, *, ranks: int) -> None:
        self._group = group
        self._ranks = ranks

    def __call__(
        self, experts: Experts, tokens: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        outgoing = counts.view(self._ranks, -1)
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing.contiguous(), group=self._group)
        sent, received = outgoing.sum(dim=1).tolist(), incoming.sum(dim=1).tolist()
        arrived = all_to_all_single_autograd(tokens, received, sent, self._group)
        # They come by rank and then by expert; the experts want them by expert and then by rank.
        ids = torch.arange(incoming.shape[1], device=counts.device)
        order = ids.repeat(self._ranks).repeat_interleave(incoming.flatten()).argsort(stable=True)
        up, down = self._local(experts.up), self._local(experts.down)
        done = expert_mlps(arrived[order], incoming.sum(dim=0), up, down)
        back: torch.Tensor = all_to_all_single_autograd(
            done[order.argsort()], sent, received, self._group
        )
        return back

    def _local(self, parameter: torch.Tensor) -> torch.Tensor:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if local.requires_grad:
            # The tokens of all these ranks have come together here; the loss counts on a mean.
            local.register_hook(lambda gradient: gradient / self._ranks)
        return local
