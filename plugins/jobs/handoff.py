"""A training state handed to another topology beside the store: the oracle of resharded restores.

Every rank writes the whole tensors that it has a part of, gathered by torch, to a file of its own;
every rank of the other topology reads all files and takes its part. Guarantees: none of the code
that captures, names, stores, reads or puts back a checkpoint has a hand in it, so a mistake there
cannot cancel out. Only the derivation of RNG streams that nobody saved is the same function, being
a definition.

Does not: verify bytes, or survive a kill. For reference runs.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from seatrial.recovery.rng import derive_seed
from seatrial.recovery.state import TrainingState

_STREAMS = ("python", "numpy", "torch", "cuda")
_PLAIN: list[Any] = [
    *(numpy.ndarray, numpy.dtype, io.BytesIO, frozenset),
    *(value.__reduce__()[0] for value in (numpy.zeros(0), numpy.float64(0))),
    *{type(numpy.dtype(code)) for code in numpy.typecodes["All"] if code != "O"},
]
"""What states may hold beside what torch loads anyway; none of it executes anything."""


def hand_off(state: TrainingState, directory: Path, *, rank: int) -> None:
    """Write this rank's file. A collective: every rank calls it, at the same step."""
    names, optimizers = _names(state.model), []
    for optimizer in _optimizers(state):
        moments = {
            names[parameter]: {key: _whole(value) for key, value in entries.items()}
            for parameter, entries in _entries(optimizer).items()
        }
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        optimizers.append({"moments": moments, "groups": groups})
    components = {name: one.state_dict() for name, one in state.stateful().items()}
    content = {
        "modules": {
            component: {name: _whole(tensor) for tensor, name in _names(module).items()}
            for component, module in state.modules().items()
        },
        "extra_states": {
            component: {
                name: copy.deepcopy(part.get_extra_state()) for name, part in _keepers(module)
            }
            for component, module in state.modules().items()
        },
        "optimizers": optimizers,
        "components": components,
        "progress": asdict(state.progress),
        "streams": {
            (name, state.stream_owners.get(name, f"rank {rank}")): _capture(name, state)
            for name in _streams(state)
        },
    }
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(content, directory / f"rank{rank}.pt")


@torch.no_grad()
def take_over(state: TrainingState, directory: Path, *, rank: int) -> None:
    """Put this rank's part of what `hand_off` wrote into a state that was just built."""
    files = sorted(directory.glob("rank*.pt"), key=lambda path: int(path.stem[4:]))
    with torch.serialization.safe_globals(_PLAIN):
        parts = [torch.load(path, weights_only=True) for path in files]
    first: dict[str, Any] = parts[0]
    for component, module in state.modules().items():
        wholes = {n: whole for part in parts for n, whole in part["modules"][component].items()}
        for tensor, name in _names(module).items():
            _fill(tensor, wholes[name])
        extras = {n: one for part in parts for n, one in part["extra_states"][component].items()}
        for name, keeper in _keepers(module):
            keeper.set_extra_state(extras[name])
    for number, optimizer in enumerate(_optimizers(state)):
        given = [part["optimizers"][number] for part in parts]
        moments = {name: entries for one in given for name, entries in one["moments"].items()}
        owned = {p for group in _keeper(optimizer).param_groups for p in group["params"]}
        for parameter, name in _names(state.model).items():
            for key, whole in moments.get(name, {}).items() if parameter in owned else ():
                _entries(optimizer).setdefault(parameter, {})[key] = _like(parameter, whole)
    for name, stateful in state.stateful().items():
        stateful.load_state_dict(first["components"][name])
    # After the schedulers, which may write a learning rate into the groups when they are loaded.
    for number, optimizer in enumerate(_optimizers(state)):
        saved_groups = first["optimizers"][number]["groups"]
        for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
            group.update(saved)
    for field, value in first["progress"].items():
        setattr(state.progress, field, value)
    saved_streams = {k: v for part in reversed(parts) for k, v in part["streams"].items()}
    for name in _streams(state):
        owner = state.stream_owners.get(name)
        kept = saved_streams.get((name, owner or f"rank {rank}"))
        where = f"resume/{state.progress.step}" + (f"/{owner}" if owner else "")
        derived = derive_seed(state.seed, where, 0 if owner else rank)
        _continue(name, kept, state, seed=derive_seed(derived, name, 0))


def _optimizers(state: TrainingState) -> list[torch.optim.Optimizer]:
    return [one.optimizer for one in state.optimizers]


def _streams(state: TrainingState) -> list[str]:
    built_in = [name for name in _STREAMS if name != "cuda" or torch.cuda.is_initialized()]
    return [*built_in, *state.generators]


def _names(model: torch.nn.Module) -> dict[torch.Tensor, str]:
    """Parameters and buffers by name, each once; DDP alone adds a prefix."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {tensor: name.removeprefix("module.") for name, tensor in named}


def _keepers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules that keep more than tensors, by name; DDP alone adds a prefix.

    Not `seatrial.recovery.modules.extra_states`, which restores go by: what that one overlooked
    would be handed over by nobody, and be equal.
    """
    for name, module in model.named_modules():
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            yield f"{name}.".removeprefix("module."), module


def _keeper(optimizer: torch.optim.Optimizer) -> Any:
    """The optimizer that keeps this rank's moments: ZeRO has one inside."""
    return getattr(optimizer, "optim", optimizer)


def _entries(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    found: dict[torch.Tensor, dict[str, Any]] = _keeper(optimizer).state
    return found


def _whole(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return copy.deepcopy(tensor)
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


def _like(parameter: torch.Tensor, whole: Any) -> Any:
    """``whole`` placed as the parameter is; a scalar (the step count) is kept as it is."""
    if not isinstance(whole, torch.Tensor):
        return whole
    if whole.shape != parameter.shape:
        return whole.clone()
    placed = torch.zeros_like(parameter.detach())
    _fill(placed, whole)
    return placed


def _capture(stream: str, state: TrainingState) -> Any:
    if stream in state.generators:
        return state.generators[stream].get_state()
    if stream == "python":
        return random.getstate()
    if stream == "numpy":
        algorithm, keys, *rest = numpy.random.get_state(legacy=True)
        return [str(algorithm), keys.tolist(), *rest]  # type: ignore[union-attr]
    return torch.cuda.get_rng_state() if stream == "cuda" else torch.get_rng_state()


def _continue(stream: str, saved: Any, state: TrainingState, *, seed: int) -> None:
    if (named := state.generators.get(stream)) is not None:
        named.manual_seed(seed) if saved is None else named.set_state(saved)
    elif stream == "python":
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
