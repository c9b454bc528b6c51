"""The tensors of a model by their logical names.

Guarantees: names are fully qualified names without the segments that wrappers insert (DDP,
DataParallel, ``torch.compile``, activation checkpointing), so a state saved under one wrapper
restores under another; a tensor that several names share appears once, under the first.

Does not: copy, or gather shards. For `seatrial.recovery` only.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .errors import StateError

_ALWAYS_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
_DATA_PARALLEL = (DistributedDataParallel, DataParallel)


def module_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by logical name; live, with sharded ones as ``DTensor``.

    Raises:
        StateError: two tensors come out under one name.
    """
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, module in _logical_modules(model):
        transient = module._non_persistent_buffers_set
        own: list[tuple[str, torch.Tensor | None]] = [*module._parameters.items()]
        own += [(name, b) for name, b in module._buffers.items() if name not in transient]
        for name, tensor in own:
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            logical = f"{prefix}{name}"
            if logical in tensors:
                raise StateError(f"two tensors of the model have the logical name {logical!r}")
            tensors[logical] = tensor
    return tensors


def extra_states(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules that keep more state than tensors (``get_extra_state``), by logical name."""
    default = torch.nn.Module.get_extra_state
    return {
        prefix.removesuffix("."): module
        for prefix, module in _logical_modules(model)
        if type(module).get_extra_state is not default
    }


def _logical_modules(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Every module once, with its logical name and a final dot (the root: an empty string)."""
    found: list[tuple[str, torch.nn.Module]] = []
    seen: set[int] = set()
    stack = [("", model)]
    while stack:
        prefix, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if isinstance(module, FSDPModule):
            # A forward pass without a backward leaves the root's parameters gathered; the
            # optimizer and the checkpoint know the shards. Resharding twice costs nothing.
            module.reshard()
        found.append((prefix, module))
        # Reversed, because the stack gives the last child out first.
        for name, child in reversed(module._modules.items()):
            if child is not None:
                wraps = name in _ALWAYS_WRAPPERS or (
                    name == "module" and isinstance(module, _DATA_PARALLEL)
                )
                stack.append((prefix if wraps else f"{prefix}{name}.", child))
    return found
