"""A training state handed to another topology beside the store: the oracle of resharded restores.

Every rank writes the whole tensors that it has a part of, gathered by torch, to a file of its own;
every rank of the other topology reads all files and takes its part. Guarantees: none of the code
that captures, names, stores, reads or puts back a checkpoint has a hand in it, so a mistake there
cannot cancel out. Only the derivation of RNG streams that nobody saved is the same function, being
a definition.

Does not: verify bytes, survive a kill, or know states with several optimizers or models, named
generators, or optimizer state that is no tensor. For reference runs.
"""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from seatrial.recovery.errors import StateError
from seatrial.recovery.rng import derive_seed
from seatrial.recovery.state import TrainingState

_STREAMS = ("python", "numpy", "torch", "cuda")


def hand_off(state: TrainingState, directory: Path, *, rank: int) -> None:
    """Write this rank's file. A collective: every rank calls it, at the same step.

    Raises:
        StateError: the state has something that only a checkpoint carries.
    """
    optimizer = _only_optimizer(state)
    names = _names(state.model)
    moments = {
        name: {key: _whole(value) for key, value in entries.items()}
        for parameter, entries in _entries(optimizer).items()
        for name in [names[parameter]]
    }
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    components = {name: one.state_dict() for name, one in state.stateful().items()}
    content = {
        "model": {name: _whole(tensor) for tensor, name in names.items()},
        "moments": moments,
        "groups": groups,
        "components": components,
        "progress": asdict(state.progress),
        "streams": {
            (name, state.stream_owners.get(name, f"rank {rank}")): _capture(name)
            for name in _STREAMS
            if name != "cuda" or torch.cuda.is_initialized()
        },
    }
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(content, directory / f"rank{rank}.pt")


@torch.no_grad()
def take_over(state: TrainingState, directory: Path, *, rank: int) -> None:
    """Put this rank's part of what `hand_off` wrote into a state that was just built."""
    files = sorted(directory.glob("rank*.pt"), key=lambda path: int(path.stem[4:]))
    parts = [torch.load(path, weights_only=True) for path in files]
    first: dict[str, Any] = parts[0]
    model = {name: whole for part in parts for name, whole in part["model"].items()}
    moments = {name: entries for part in parts for name, entries in part["moments"].items()}
    optimizer = _only_optimizer(state)
    owned = {p for group in _keeper(optimizer).param_groups for p in group["params"]}
    for parameter, name in _names(state.model).items():
        _fill(parameter, model[name])
        for key, whole in moments.get(name, {}).items() if parameter in owned else ():
            _entries(optimizer).setdefault(parameter, {})[key] = _like(parameter, whole)
    for name, component in state.stateful().items():
        component.load_state_dict(first["components"][name])
    for group, saved in zip(optimizer.param_groups, first["groups"], strict=True):
        group.update(saved)
    for field, value in first["progress"].items():
        setattr(state.progress, field, value)
    saved_streams = {k: v for part in reversed(parts) for k, v in part["streams"].items()}
    for name in _STREAMS:
        if name == "cuda" and not torch.cuda.is_initialized():
            continue
        owner = state.stream_owners.get(name)
        saved = saved_streams.get((name, owner or f"rank {rank}"))
        where = f"resume/{state.progress.step}" + (f"/{owner}" if owner else "")
        derived = derive_seed(state.seed, where, 0 if owner else rank)
        _continue(name, saved, seed=derive_seed(derived, name, 0))


def _only_optimizer(state: TrainingState) -> torch.optim.Optimizer:
    optimizers = [one.optimizer for one in state.optimizers]
    unknown = [f"the RNG stream {name}" for name in state.generators]
    unknown += [f"the module {name}" for name in state.components() if state.is_extra_module(name)]
    if len(optimizers) != 1:
        unknown.append(f"{len(optimizers)} optimizers")
    if unknown:
        raise StateError(
            "a resharded restore cannot be judged: handing the state to another topology beside "
            f"the checkpoint knows one optimizer and one model, and this job has "
            f"{', '.join(unknown)}"
        )
    return optimizers[0]


def _names(model: torch.nn.Module) -> dict[torch.Tensor, str]:
    """Parameters and buffers by name, each once; DDP alone adds a prefix."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {tensor: name.removeprefix("module.") for name, tensor in named}


def _keeper(optimizer: torch.optim.Optimizer) -> Any:
    """The optimizer that keeps this rank's moments: ZeRO has one inside."""
    return getattr(optimizer, "optim", optimizer)


def _entries(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    found: dict[torch.Tensor, dict[str, torch.Tensor]] = _keeper(optimizer).state
    return found


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu().clone()


def _fill(target: torch.Tensor, whole: torch.Tensor) -> None:
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    sizes, offsets = compute_local_shape_and_global_offset(
        target.shape, target.device_mesh, target.placements
    )
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        whole = whole.narrow(dim, min(offset, whole.shape[dim]), size)
    target.to_local().copy_(whole)


def _like(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """``whole`` placed as the parameter is; a scalar (the step count) is kept as it is."""
    if whole.shape != parameter.shape:
        return whole.clone()
    placed = torch.zeros_like(parameter.detach())
    _fill(placed, whole)
    return placed


def _capture(stream: str) -> Any:
    if stream == "python":
        return random.getstate()
    if stream == "numpy":
        algorithm, keys, *rest = numpy.random.get_state(legacy=True)
        return [str(algorithm), keys.tolist(), *rest]  # type: ignore[union-attr]
    return torch.cuda.get_rng_state() if stream == "cuda" else torch.get_rng_state()


def _continue(stream: str, saved: Any, *, seed: int) -> None:
    if stream == "python":
        random.seed(seed) if saved is None else random.setstate(saved)
    elif stream == "numpy" and saved is None:
        numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    elif stream == "numpy":
        algorithm, keys, *rest = saved
        numpy.random.set_state((algorithm, numpy.array(keys, dtype=numpy.uint32), *rest))
    elif stream == "cuda":
        torch.cuda.manual_seed(seed) if saved is None else torch.cuda.set_rng_state(saved)
    elif saved is None:
        torch.default_generator.manual_seed(seed)
    else:
        torch.set_rng_state(saved)
