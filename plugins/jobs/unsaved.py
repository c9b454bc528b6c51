"""Objects of a job that carry training state and that its `TrainingState` does not hold.

A weight average or a grad scaler that was forgotten there is saved by nobody, and changes no loss
for a while. Guarantees: modules, optimizers, LR schedulers and grad scalers that can be reached
from the job's attributes (also in its own objects, lists, tuples and dictionaries, a few levels
deep) are fingerprinted, so that a restart which does not bring them back is seen. What is the same
as in the reference by the end of a step is no difference, whoever put it back.

Does not: look at plain values, at RNG streams, or at what only a closure, a slot or a global name
holds. A job names in ``unsaved`` what need not come back. For `seatrial.plugins.jobs.loop` only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from seatrial.recovery.errors import StateError
from seatrial.recovery.fingerprint import Fingerprinter
from seatrial.recovery.modules import module_tensors
from seatrial.recovery.plain import dumps
from seatrial.recovery.state import TrainingState, without_counters

_DEPTH = 3
_ITEMS_MAX = 64
"""Of a longer list or dictionary no item is looked at: it is data, not a handful of objects."""

_FOREIGN = ("torch", "numpy", "builtins", "seatrial", "collections", "threading", "logging")
"""Packages whose objects are not opened."""

_CARRIERS = (torch.nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)


class Unsaved:
    """The fingerprints of such objects of one job on one rank, whenever it is asked.

    Args:
        job: the job; its attribute ``unsaved``, if any, names those that need not come back, as
            they are named here: ``meter``, ``trainer.meter``, ``meters[0]``.
    """

    def __init__(self, job: object, state: TrainingState, *, rank: int) -> None:
        self._job = job
        self._state = state
        ignored = getattr(job, "unsaved", ())
        self._ignored = frozenset((ignored,) if isinstance(ignored, str) else ignored)
        self._fingerprinter = Fingerprinter(rank=rank)
        self._unread: dict[str, str] = {}
        self._told: set[str] = set()

    def unread(self) -> dict[str, str]:
        """What was left out of the fingerprints so far, and why; each is told once."""
        news = {name: why for name, why in self._unread.items() if name not in self._told}
        self._told |= news.keys()
        return news

    def __call__(self) -> dict[str, str]:
        """Attribute -> fingerprint. What cannot be read is left out; see `unread`."""
        state = self._state
        known = {id(one.optimizer) for one in state.optimizers}
        known |= {id(each) for each in (*state.stateful().values(), *state.modules().values())}
        carriers = _carriers(self._job, self._ignored)
        unknown = [(name, value) for name, value in carriers if id(value) not in known]
        if not unknown:
            return {}
        held = {id(tensor) for tensor in state.tensors().values()}
        tensors: dict[str, torch.Tensor] = {}
        owners: dict[str, str] = {}
        objects: dict[str, object] = {}
        for name, value in unknown:
            found, plain = _contents(value)
            own = {f"{name}/{key}": t for key, t in found.items() if id(t) not in held}
            unread = {key: why for key, tensor in own.items() if (why := _unreadable(tensor))}
            self._unread |= unread
            tensors |= {key: tensor for key, tensor in own.items() if key not in unread}
            owners |= dict.fromkeys(own, name)
            if plain is not None:
                objects[name] = plain
        return self._by_attribute(tensors, owners, objects)

    def _by_attribute(
        self,
        tensors: Mapping[str, torch.Tensor],
        owners: Mapping[str, str],
        objects: Mapping[str, object],
    ) -> dict[str, str]:
        parts: dict[str, list[object]] = {}
        for name, part in self._fingerprinter.tensors(tensors).items():
            parts.setdefault(owners[name], []).append((name, list(part)))
        for name, value in objects.items():
            try:
                plain = dumps(value).decode()
            except StateError as error:
                self._unread[name] = str(error)
            else:
                parts.setdefault(name, []).append(plain)
        return {
            name: hashlib.blake2b(repr(each).encode(), digest_size=16).hexdigest()
            for name, each in parts.items()
        }


def _carriers(job: object, ignored: Collection[str]) -> Iterator[tuple[str, object]]:
    """Every such object with the path to it, once, in the order of the attributes."""
    seen: set[int] = {id(job)}
    own = getattr(job, "__dict__", {})
    stack = [(name, value, 1) for name, value in own.items()][::-1]
    while stack:
        name, value, depth = stack.pop()
        if name in ignored or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _CARRIERS):
            yield name, value
        elif depth <= _DEPTH:
            inner = [(path, each, depth + 1) for path, each in _inside(name, value)]
            stack += inner[::-1]


def _inside(name: str, value: object) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        named = value.items() if _few(value) else ()
        # Other keys may have no name that lasts longer than the process.
        pairs = [(f"{name}[{key!r}]", each) for key, each in named if type(key) in (str, int)]
    elif isinstance(value, (list, tuple)):
        pairs = [(f"{name}[{i}]", each) for i, each in enumerate(value)] if _few(value) else []
    elif type(value).__module__.partition(".")[0] in _FOREIGN:
        pairs = []
    else:
        own = getattr(value, "__dict__", None)
        pairs = [(f"{name}.{key}", each) for key, each in own.items()] if type(own) is dict else []
    return pairs


def _few(value: Collection[object]) -> bool:
    return len(value) <= _ITEMS_MAX


def _contents(value: object) -> tuple[dict[str, torch.Tensor], object | None]:
    """Its tensors by name, and the rest as plain data (None: nothing)."""
    if isinstance(value, torch.nn.Module):
        return module_tensors(value), None
    if isinstance(value, Optimizer):
        entries = [
            (f"{number}/{key}", entry)
            for number, parameter in enumerate(_parameters(value))
            for key, entry in value.state.get(parameter, {}).items()
        ]
        groups = [{k: v for k, v in g.items() if k != "params"} for g in value.param_groups]
        found = {name: entry for name, entry in entries if isinstance(entry, torch.Tensor)}
        return found, [groups, [each for each in entries if each[0] not in found]]
    assert isinstance(value, LRScheduler | torch.amp.GradScaler)
    return {}, without_counters(value.state_dict())


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _unreadable(tensor: torch.Tensor) -> str:
    """Why a tensor has no bits to compare; empty if it has."""
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return "it has no shape yet"
    if tensor.is_meta:
        return "it is on the device meta"
    if isinstance(tensor, DTensor) and any(each.is_partial() for each in tensor.placements):
        return "it is a DTensor with a pending reduction"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return f"it is a {tensor.layout} tensor of {tensor.dtype}"
    return ""
