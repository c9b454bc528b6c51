"""The bundled model put on its topology: the kinds of parallelism, one after the other.

Guarantees: the parameters keep the model's logical names and, added up over the ranks, its values,
so states of all topologies are comparable and restore onto each other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from seatrial.recovery.modules import module_tensors

from ..model import GPT
from .context import over_positions
from .experts import over_expert_ranks
from .gradients import AgreedGradScaler, GradientNorm
from .pipeline import TiedWeights, cut
from .place import Place
from .replicas import is_plain, over_all_ranks, over_data_ranks
from .tensor import over_tensor_ranks


@dataclass(frozen=True, kw_only=True)
class Distributed:
    """A model on its topology, with what a training step needs to know of it.

    ``model`` is wrapped for training; ``core`` is the GPT inside, cut to this rank's stage.
    ``clip`` scales all gradients to a largest norm. ``positions`` of each window are this rank's.
    ``stages`` is the group of a pipeline's stages, and ``parameter_groups`` are then the names of
    matrices and of vectors over all of them.
    """

    model: nn.Module
    core: GPT
    place: Place
    clip: Callable[[float], object]
    scaler: type[torch.amp.GradScaler] = torch.amp.GradScaler
    positions: slice = field(default_factory=lambda: slice(None))
    stages: ProcessGroup | None = None
    parameter_groups: list[list[str]] | None = None
    tied_weights: TiedWeights | None = None


def distribute(
    model: GPT, place: Place, *, device_type: str, context: int, bucket_mb: float
) -> Distributed:
    """Put ``model`` on its topology, in place; ``context`` is the length of a window.

    A collective over all ranks. The job has checked that it can run on the topology.
    """
    if is_plain(place):
        wrapped = over_all_ranks(model, bucket_mb=bucket_mb)
        return Distributed(model=wrapped, core=model, place=place, clip=_clip_by_torch(wrapped))
    topology = place.topology
    mesh = topology.mesh(device_type)
    names = module_tensors(model)
    groups = [[n for n, p in names.items() if matrix is is_matrix(p)] for matrix in (True, False)]
    tied = model.head.weight is model.token_embedding.weight
    positions = slice(None)
    if topology.size("pp") > 1:
        cut(model, place)
    if topology.size("tp") > 1:
        over_tensor_ranks(model, mesh["tp"])
    if topology.size("ep") > 1:
        over_expert_ranks(model, mesh["ep"])
    if topology.size("cp") > 1:
        positions = over_positions(model, mesh["cp"], context=context)
    wrapped = over_data_ranks(model, place, mesh)
    # torch's own are right where all ranks hold whole gradients, or all are sharded over one mesh.
    is_uniform = mesh.mesh_dim_names == ("fsdp",) or topology.world_size == 1
    return Distributed(
        model=wrapped,
        core=model,
        place=place,
        positions=positions,
        stages=mesh.get_group("pp") if topology.size("pp") > 1 else None,
        parameter_groups=groups if topology.size("pp") > 1 else None,
        tied_weights=TiedWeights(model, place) if tied and topology.size("pp") > 1 else None,
        clip=_clip_by_torch(wrapped) if is_uniform else _clip_over_meshes(wrapped),
        scaler=torch.amp.GradScaler if is_uniform else AgreedGradScaler,
    )


def is_matrix(parameter: torch.Tensor) -> bool:
    """Matrices decay; norms and biases, which have one dimension, do not."""
    return parameter.dim() >= 2


def adamw(
    place: Place, parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """AdamW with a group of matrices and one of vectors; ZeRO stage 1 where the topology says."""
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if is_matrix(p)], "weight_decay": weight_decay},
        {"params": [p for p in parameters if not is_matrix(p)], "weight_decay": 0.0},
    ]
    if place.topology.zero:
        return _zero_redundancy(groups, lr=lr)
    return torch.optim.AdamW(groups, lr=lr)


def _zero_redundancy(groups: list[dict[str, Any]], *, lr: float) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        # Importing it scripts functional optimizers that nobody here uses, and takes half a second.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW, lr=lr)


def _clip_by_torch(model: nn.Module) -> Callable[[float], object]:
    return lambda largest: nn.utils.clip_grad_norm_(model.parameters(), largest)


def _clip_over_meshes(model: nn.Module) -> Callable[[float], object]:
    names = {tensor: name for name, tensor in module_tensors(model).items()}
    return GradientNorm(names).clip
