"""The operations of a process group, and what of a call all its ranks have to say alike.

Guarantees: for each method through which torch calls a group, the name that users know it by, the
tensors in which a mismatch between ranks is an error, and where its reduction and its root are.
Sizes that may rightly differ from rank to rank (of ``all_to_all``) are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch.distributed import ReduceOp

Arguments = Sequence[Any]
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """One operation. ``methods`` are those of `torch.distributed.ProcessGroup` that carry it.

    ``compared`` are the tensors whose shapes and dtypes every rank must have alike, ``payload``
    those that the call leaves its result in. ``options`` is the index of the argument that holds
    the reduction or the root. ``peer`` and ``tag`` are the indices of a point-to-point call's.
    """

    name: str
    methods: tuple[str, ...]
    compared: Callable[[Arguments], Tensors]
    payload: Callable[[Arguments], Tensors]
    options: int = 1
    has_reduction: bool = False
    has_root: bool = False
    compares_shapes: bool = True
    peer: int | None = None
    tag: int | None = None

    is_point_to_point: bool = False

    @cached_property
    def terms(self) -> Callable[[Arguments], Hashable]:
        """What else every rank must say alike: the reduction, the root, the peer and the tag."""
        if self.is_point_to_point:
            return partial(_message_of, self)
        if self.has_reduction:
            return partial(_both_of if self.has_root else reduction_of, self)
        return partial(root_of if self.has_root else _nothing_of, self)


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in _flat(each)]


def first_tensors(arguments: Arguments) -> Tensors:
    value = arguments[0]
    # Whether something is a tensor takes four times as long to ask as whether it is a list.
    return value if type(value) is list or not isinstance(value, torch.Tensor) else (value,)


def _second(arguments: Arguments) -> Tensors:
    value = arguments[1]
    return value if type(value) is list or not isinstance(value, torch.Tensor) else (value,)


def _all_of_first(arguments: Arguments) -> Tensors:
    return _flat(arguments[0])


def _all_of_second(arguments: Arguments) -> Tensors:
    return _flat(arguments[1])


def _none(arguments: Arguments) -> Tensors:
    return ()


def _one_of_first(arguments: Arguments) -> Tensors:
    return _flat(arguments[0])[:1]


def _in_place(name: str, *methods: str, **more: Any) -> Operation:
    return Operation(
        name=name, methods=methods, compared=first_tensors, payload=first_tensors, **more
    )


OPERATIONS = (
    _in_place("all_reduce", "allreduce", has_reduction=True),
    _in_place("all_reduce_coalesced", "allreduce_coalesced", has_reduction=True),
    _in_place("broadcast", "broadcast", has_root=True),
    _in_place("reduce", "reduce", has_reduction=True, has_root=True),
    # Its outputs may be of different sizes, but the same on every rank.
    Operation(
        name="all_gather",
        methods=("allgather", "allgather_coalesced"),
        compared=_all_of_first,
        payload=_all_of_first,
    ),
    Operation(
        name="all_gather_into_tensor",
        methods=("_allgather_base", "all_gather_single"),
        compared=_second,
        payload=first_tensors,
    ),
    Operation(
        name="all_gather_into_tensor_coalesced",
        methods=("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
        compared=_second,
        payload=first_tensors,
    ),
    Operation(
        name="reduce_scatter",
        methods=("reduce_scatter",),
        compared=_all_of_second,
        payload=first_tensors,
        options=2,
        has_reduction=True,
    ),
    Operation(
        name="reduce_scatter_tensor",
        methods=("_reduce_scatter_base", "reduce_scatter_single"),
        compared=first_tensors,
        payload=first_tensors,
        options=2,
        has_reduction=True,
    ),
    Operation(
        name="reduce_scatter_tensor_coalesced",
        methods=("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
        compared=first_tensors,
        payload=first_tensors,
        options=2,
        has_reduction=True,
    ),
    Operation(
        name="all_to_all",
        methods=("alltoall",),
        compared=_one_of_first,
        payload=first_tensors,
        compares_shapes=False,
    ),
    Operation(
        name="all_to_all_single",
        methods=("alltoall_base", "all_to_all_single"),
        compared=first_tensors,
        payload=first_tensors,
        compares_shapes=False,
    ),
    Operation(
        name="gather",
        methods=("gather",),
        compared=_second,
        payload=_all_of_first,
        options=2,
        has_root=True,
    ),
    Operation(
        name="scatter",
        methods=("scatter",),
        compared=first_tensors,
        payload=first_tensors,
        options=2,
        has_root=True,
    ),
    Operation(name="barrier", methods=("barrier",), compared=_none, payload=_none),
    _in_place("send", "send", peer=1, tag=2, is_point_to_point=True),
    _in_place("recv", "recv", peer=1, tag=2, is_point_to_point=True),
    _in_place("recv_any", "recv_anysource", tag=1, is_point_to_point=True),
)


def reduction_of(operation: Operation, arguments: Arguments) -> int:
    """The reduction as torch numbers it, 0 (a sum) where the call does not say."""
    # The hash of a ReduceOp is its number; its attribute ``op`` takes ten times as long.
    try:
        return hash(arguments[operation.options].reduceOp)
    except (AttributeError, IndexError):
        given = (value for value in arguments[operation.options :] if isinstance(value, ReduceOp))
        return hash(next(given, ReduceOp(ReduceOp.SUM)))


def root_of(operation: Operation, arguments: Arguments) -> int:
    """The root's rank in the group, 0 where the call does not say."""
    value = arguments[operation.options] if len(arguments) > operation.options else 0
    root: int = value if isinstance(value, int) else value.rootRank
    return root


def _both_of(operation: Operation, arguments: Arguments) -> Hashable:
    return reduction_of(operation, arguments), root_of(operation, arguments)


def _message_of(operation: Operation, arguments: Arguments) -> Hashable:
    assert operation.tag is not None
    peer = None if operation.peer is None else arguments[operation.peer]
    return arguments[operation.tag], peer


def _nothing_of(operation: Operation, arguments: Arguments) -> Hashable:
    return None
