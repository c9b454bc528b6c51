"""Which names of a state_dict are one tensor, so that tied weights are stored once.

Guarantees: names are called one only if they show the same elements of the same memory, in the same
place of a tensor of the same shape; of such names the smallest stands for all, so ranks that hold
the same ties agree without a message.

Does not: look at values (equal tensors in different memory are two), or into planners other than
`DefaultSavePlanner`, which may change what they save. Called by the DCP writer.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.tensor import DTensor

__all__ = ["canonical_names"]


def canonical_names(planner: SavePlanner) -> dict[str, str]:
    """For each tensor's name, the name that stands for it."""
    if type(planner) is not DefaultSavePlanner:
        return {}
    first: dict[Hashable, str] = {}
    names = {}
    for name in sorted(planner.state_dict):
        identity = _identity(planner.state_dict[name])
        if identity is not None:
            names[name] = first.setdefault(identity, name)
    return names


def _identity(value: object) -> Hashable | None:
    """Equal for two tensors that are one; None for what is never tied."""
    place: Hashable = None
    if isinstance(value, DTensor):
        place = (value.device_mesh, value.placements, tuple(value.shape))
        value = value.to_local()
    elif type(value) not in (torch.Tensor, torch.nn.Parameter):
        return None
    assert isinstance(value, torch.Tensor)
    if value.layout is not torch.strided or value.numel() == 0 or value.is_meta:
        return None
    return (
        place,
        value.device,
        value.untyped_storage().data_ptr(),
        value.storage_offset(),
        tuple(value.shape),
        value.stride(),
        value.dtype,
        value.is_conj(),
        value.is_neg(),
    )
