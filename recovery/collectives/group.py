"""A process group that sees its own calls, in place of the one that torch would have made.

Guarantees: every collective and point-to-point call is taken down, see `calls`, before it reaches
the backend, whoever makes it: the program, the reducer of DDP, FSDP, functional
collectives, pipelines. The group has the backends, names and options that torch gave it; the call
itself is made by an ordinary group over the same backends, so dispatch and profiling stay torch's.

Does not see: what goes to a backend beside its group, such as ``monitored_barrier``.

`torch.distributed.ProcessGroup` may be subclassed in Python, and C++ calls the overrides; a
`Backend` may not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import ProcessGroup

from .calls import override
from .callsite import CallSite
from .journal import Signature, Stream
from .operations import OPERATIONS, Operation, reduction_of, root_of

if TYPE_CHECKING:
    from .observer import Observer

_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
Pair = tuple[int, int]


class ObservedGroup(ProcessGroup):
    """See the module. ``ranks`` are the global ones; ``collectives`` and ``pairs`` are journals.

    A pair is (sender, receiver), as ranks of the group. ``unobserved`` is a group of the same ranks
    and backends, for calls that are nobody's to see. ``signatures`` has every kind of call that
    this rank has made here.
    """

    observer: Observer

    def __init__(self, store: Any, rank: int, size: int) -> None:
        # The constructor with a store makes no object that C++ would find the overrides of.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store = store
        self.unobserved = ProcessGroup(store, rank, size)
        self.is_timed = False
        self.signatures: dict[object, Signature] = {}
        self.index = self.observer.next_index("group")
        self.ranks: tuple[int, ...] = ()
        self.collectives = Stream()
        self.pairs: dict[Pair, Stream] = {}
        self.hears_anyone = False

    def belongs_to(self, ranks: Sequence[int]) -> None:
        """Torch has made the group, with its name and all that."""
        self.ranks = tuple(ranks)
        if self.bound_device_id is not None:
            self.unobserved.bound_device_id = self.bound_device_id
        devices = {device.type for device in self._device_types}
        self.is_timed = "cuda" not in devices or self._get_backend_name() == "gloo"
        self.observer.log_name(
            "group", self.index, name=self.label, torch=self.group_name, ranks=self.ranks
        )

    @property
    def label(self) -> str:
        """The description if it has one, else the name."""
        described = self.group_desc
        return self.group_name if described in ("", "undefined") else described

    def between(self, operation: Operation, arguments: Sequence[Any]) -> Stream:
        """The journal of messages between this rank and the peer of such a call."""
        own = self.rank()
        other = -1 if operation.peer is None else int(arguments[operation.peer])
        self.hears_anyone = self.hears_anyone or other < 0
        if other == own:
            return Stream()  # to itself: there is nobody to disagree with
        pair = (own, other) if operation.name == "send" else (other, own)
        return self.pairs.setdefault(pair, Stream())

    def describe(self, operation: Operation, arguments: Sequence[Any], site: CallSite) -> Signature:
        """What is the same in all calls like this one; the log is told."""
        tensors = operation.compared(arguments)
        shapes = ", ".join("x".join(map(str, t.shape)) or "scalar" for t in tensors)
        extra = []
        if operation.has_reduction:
            reduction = reduction_of(operation, arguments)
            extra.append(_REDUCTIONS[reduction] if reduction < len(_REDUCTIONS) else "other")
        if operation.has_root:
            extra.append(f"root {self.ranks[root_of(operation, arguments)]}")
        if operation.tag is not None:
            extra.append(f"tag {arguments[operation.tag]}")
        signature = Signature(
            index=self.observer.next_index("call"),
            operation=operation.name,
            shapes=shapes if operation.compares_shapes else "",
            dtypes=", ".join(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in tensors)),
            extra=", ".join(extra),
            site=site,
            size_bytes=sum(t.numel() * t.itemsize for t in tensors),
            is_message=operation.is_point_to_point,
        )
        facts: dict[str, object] = {"operation": operation.name, "site": str(site)}
        words = [shapes, signature.dtypes, signature.extra]
        facts |= {"shapes": " ".join(filter(None, words)), "size_bytes": signature.size_bytes}
        if operation.peer is not None and arguments[operation.peer] >= 0:
            facts["peer"] = self.ranks[arguments[operation.peer]]
        self.observer.log_name("call", signature.index, **facts)
        return signature

    # What torch sets on the group it has made holds for the one that makes the calls, too.

    def _register_backend(self, device: torch.device, kind: Any, backend: Any = None) -> None:
        super()._register_backend(device, kind, backend)
        self.unobserved._register_backend(device, kind, backend)

    def _set_default_backend(self, kind: Any) -> None:
        super()._set_default_backend(kind)
        self.unobserved._set_default_backend(kind)

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)  # type: ignore[arg-type]
        self.unobserved._set_group_name(name)  # type: ignore[arg-type]

    def _set_group_desc(self, description: str) -> None:
        super()._set_group_desc(description)
        self.unobserved._set_group_desc(description)

    def get_group_store(self) -> Any:
        return self._store


for _operation in OPERATIONS:
    for _method in _operation.methods:
        setattr(ObservedGroup, _method, override(_operation, _method))
