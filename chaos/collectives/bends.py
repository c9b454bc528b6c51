"""What each fault does to a call: one function for each action, which returns the call's handle.

Guarantees: what is done is what a wrong program would have done: the changed call is made through
the same journal as any other, so detection has to find it, and is not told. An action that makes no
sense for a call raises `Unable`, and the call is made as it was.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.distributed import ReduceOp

from seatrial.recovery.collectives.calls import Call
from seatrial.recovery.collectives.group import ObservedGroup

from ..fault import Fault
from .payload import damage, damageable
from .works import Done, FollowedUp, Never

_SAME_SIZE = {
    torch.float16: torch.bfloat16,
    torch.bfloat16: torch.float16,
    torch.float32: torch.int32,
    torch.int32: torch.float32,
    torch.float64: torch.int64,
    torch.int64: torch.float64,
}
_IN_PLACE = ("all_reduce", "broadcast", "reduce", "send", "recv")
_SCALED = ("all_gather_into_tensor", "reduce_scatter_tensor")


class Unable(Exception):
    """The action does not apply to this call; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Bend:
    """One call that a fault strikes. ``says`` is told what was done, as half a sentence."""

    call: Call
    fault: Fault
    chance: random.Random
    groups: Sequence[ObservedGroup]
    says: Callable[[str], None]

    @property
    def name(self) -> str:
        return self.call.operation.name


def skip(bend: Bend) -> Work:
    bend.says("was not made")
    return Done(bend.call.operation.payload(bend.call.arguments))


def duplicate(bend: Bend) -> Work:
    bend.says("was made twice")
    bend.call.issue().wait()
    return bend.call.issue()


def drop(bend: Bend) -> Work:
    bend.says("was neither made nor ever done")
    return Never()


def wrong_shape(bend: Bend) -> Work:
    """Half the elements; of a single one, two."""
    arguments = list(bend.call.arguments)
    if bend.name in _IN_PLACE:
        tensor = _only(bend, arguments[0])
        if tensor.numel() == 1:
            return _doubled(bend, tensor)
        half = _part(bend, tensor, tensor.numel() // 2)
        arguments[0] = half if isinstance(arguments[0], torch.Tensor) else [half]
    elif bend.name in _SCALED:
        output, source = arguments[:2]
        arguments[0] = _part(bend, output, output.numel() // 2)
        arguments[1] = _part(bend, source, source.numel() // 2)
    else:
        raise Unable(f"the shape of {bend.name} is not changed")
    bend.says("was made with half its elements")
    return replace(bend.call, arguments=arguments).issue()


def _doubled(bend: Bend, tensor: torch.Tensor) -> Work:
    both = tensor.detach().reshape(1).repeat(2)
    given = bend.call.arguments[0]
    first = both if isinstance(given, torch.Tensor) else [both]
    bend.says("was made with two elements instead of one")

    def put_back() -> None:
        tensor.detach().copy_(both[:1].reshape(tensor.shape))

    work = replace(bend.call, arguments=[first, *bend.call.arguments[1:]]).issue()
    return FollowedUp(work, put_back)


def wrong_dtype(bend: Bend) -> Work:
    """The same bytes under another name, or the values in another size."""
    if bend.name not in _IN_PLACE:
        raise Unable(f"the dtype of {bend.name} is not changed")
    arguments = list(bend.call.arguments)
    tensor = _only(bend, arguments[0])
    if bend.fault.size == "same":
        if tensor.dtype not in _SAME_SIZE:
            raise Unable(f"no other dtype is known of the size of {tensor.dtype}")
        other = tensor.detach().view(_SAME_SIZE[tensor.dtype])
    else:
        wide = torch.float64 if tensor.itemsize < 8 else torch.float32
        other = tensor.detach().to(wide)
    arguments[0] = other if isinstance(arguments[0], torch.Tensor) else [other]
    bend.says(f"was made with {other.dtype} instead of {tensor.dtype}")
    work = replace(bend.call, arguments=arguments).issue()
    if bend.fault.size == "same" or bend.name == "send":
        return work

    def put_back() -> None:
        tensor.detach().copy_(other)

    return FollowedUp(work, put_back)


def wrong_reduction(bend: Bend) -> Work:
    operation = bend.call.operation
    if not operation.has_reduction:
        raise Unable(f"{bend.name} reduces nothing")
    arguments, named = list(bend.call.arguments), dict(bend.call.named)
    for index, value in enumerate(arguments):
        if isinstance(value, ReduceOp):
            arguments[index] = _other_reduction(value)
        elif hasattr(value, "reduceOp"):
            value.reduceOp = _other_reduction(value.reduceOp)
    if len(arguments) <= operation.options:
        raise Unable("the call does not say its reduction")
    bend.says("was made with another reduction")
    return replace(bend.call, arguments=arguments, named=named).issue()


def _other_reduction(given: Any) -> Any:
    return ReduceOp(ReduceOp.MAX if given == ReduceOp.SUM else ReduceOp.SUM)


def wrong_root(bend: Bend) -> Work:
    if bend.name not in ("broadcast", "reduce"):
        raise Unable(f"the root of {bend.name} is not changed")
    arguments = list(bend.call.arguments)
    index = bend.call.operation.options
    if len(arguments) <= index or bend.call.group.size() < 2:
        raise Unable("the call has no other root to name")
    value, size = arguments[index], bend.call.group.size()
    if isinstance(value, int):
        arguments[index] = (value + 1) % size
    else:
        value.rootRank = (value.rootRank + 1) % size
    bend.says("was made with the next rank as its root")
    return replace(bend.call, arguments=arguments).issue()


def wrong_group(bend: Bend) -> Work:
    operation, own = bend.call.operation, bend.call.group
    if operation.has_root or operation.is_point_to_point:
        raise Unable(f"the ranks that {bend.name} names are others in another group")
    others = [each for each in bend.groups if each is not own and len(each.ranks) > 1]
    if bend.name not in ("all_reduce", "all_reduce_coalesced", "barrier"):
        others = [each for each in others if each.size() == own.size()]
    if not others:
        raise Unable("this rank is in no other group that could take the call")
    bend.says(f"was made in group {others[0].label}")
    return replace(bend.call, group=others[0]).issue()


def garble(bend: Bend) -> Work:
    """The result that this rank sees, or what it contributes."""
    call, fault = bend.call, bend.fault
    in_place = call.operation.name in _IN_PLACE or len(call.arguments) < 2
    if call.operation.name == "send":
        # The sender's own copy stays as it is.
        copies = [each.clone() for each in call.operation.payload(call.arguments)]
        _damaged(bend, copies)
        return replace(call, arguments=[copies, *call.arguments[1:]]).issue()
    if fault.of == "input":
        given = call.arguments[0 if in_place else 1]
        _damaged(bend, _flat(given))
        return call.issue()
    payload = _flat(call.operation.payload(call.arguments))
    if not payload:
        raise Unable(f"{bend.name} has no payload")
    # Before the call: once it is under way, whoever waits for it would be told.
    _require_damageable(bend, payload)
    return FollowedUp(call.issue(), lambda: _damaged(bend, payload))


def _require_damageable(bend: Bend, tensors: Sequence[torch.Tensor]) -> None:
    if not damageable(tensors, bend.fault.to):
        what = "have a bit flipped" if bend.fault.to == "bit" else f"become {bend.fault.to}"
        raise Unable(f"{bend.name} has no payload that could {what}")


def _damaged(bend: Bend, tensors: Sequence[torch.Tensor]) -> None:
    _require_damageable(bend, tensors)
    what = damage(tensors, bend.fault.to, bend.chance)
    bend.says(f"had its {bend.fault.of} damaged: {what}")


BENDS: dict[str, Callable[[Bend], Work]] = {
    "skip": skip,
    "duplicate": duplicate,
    "wrong-shape": wrong_shape,
    "wrong-dtype": wrong_dtype,
    "wrong-reduction": wrong_reduction,
    "wrong-root": wrong_root,
    "wrong-group": wrong_group,
    "garble": garble,
    "drop": drop,
}
"""What is done, by action; ``reorder``, which concerns two calls, is the bender's."""


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in _flat(each)]


def _only(bend: Bend, value: Any) -> torch.Tensor:
    tensors = _flat(value)
    if len(tensors) != 1:
        raise Unable(f"{bend.name} has {len(tensors)} tensors")
    return tensors[0]


def _part(bend: Bend, tensor: torch.Tensor, count: int) -> torch.Tensor:
    if count < 1 or not tensor.is_contiguous():
        raise Unable(f"the tensor of {bend.name} cannot be cut in two")
    return tensor.detach().view(-1)[:count]
