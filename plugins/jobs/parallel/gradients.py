"""Clipping and loss scaling where gradients are spread over several meshes.

Guarantees: every rank finds the same norm, and the same answer to whether a gradient overflowed,
so no rank skips a step that another takes; each element counts once, however many ranks hold it.

torch's own do neither: ``clip_grad_norm_`` refuses gradients of two meshes, and ``GradScaler``
looks at a rank's own gradients, so an overflow in one tensor-parallel shard splits the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from seatrial.recovery.layout import local_parts


def local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What this rank holds of the gradients that there are."""
    found = [p.grad for p in parameters if p.grad is not None]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in found]


class GradientNorm:
    """The norm of all gradients of a job. Making one is a collective over all ranks.

    ``names`` are the logical names of the parameters, equal for copies.
    """

    def __init__(self, names: Mapping[torch.Tensor, str]) -> None:
        self._parameters = list(names)
        held = {
            part.region: i for i, part in enumerate(local_parts({n: p for p, n in names.items()}))
        }
        regions = [(r.name, r.offsets) for r in held]
        everybody: list[list[tuple[str, tuple[int, ...]]]] = [
            [] for _ in range(dist.get_world_size())
        ]
        dist.all_gather_object(everybody, regions)
        before = {region for held in everybody[: dist.get_rank()] for region in held}
        counted = {name for name, offsets in regions if (name, offsets) not in before}
        self._counted = [p for p, name in names.items() if name in counted]

    @torch.no_grad()
    def clip(self, largest: float) -> None:
        """Scale all gradients so that their norm is at most ``largest``."""
        grads = local_gradients(self._counted)
        device = self._parameters[0].device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for grad in grads:
            total += grad.double().square().sum()
        dist.all_reduce(total)
        factor = (largest / (total.sqrt() + 1e-6)).clamp(max=1.0).float()
        for grad in local_gradients(self._parameters):
            grad.mul_(factor.to(grad.dtype))


class AgreedGradScaler(torch.amp.GradScaler):
    """A ``GradScaler`` whose ranks agree on what overflowed; see ``ShardedGradScaler`` of FSDP."""

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        grads = local_gradients(parameters)
        if grads:
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
        dist.all_reduce(found_inf, dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}
