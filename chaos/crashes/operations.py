"""What ranks did to files or objects in one place, and what they had heard of each other by then.

A `Recording` holds for every rank its operations in order; `Recording.before` is what was there,
durably, before. A `Cut` says how many operations of each rank were done. Torch-free values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Kind = Literal[
    "mkdir",
    "rmdir",
    "create",
    "write",
    "truncate",
    "fsync",
    "link",
    "rename",
    "unlink",
    "put",
    "put new",
    "delete",
    "answer",
    "hear",
    "acknowledge",
]
"""Of files: ``mkdir`` to ``unlink``; of objects: ``put`` to ``answer``."""

UPLOAD = "#upload-"
"""In the name of an unfinished upload, between that of its object and a number."""

Cut = tuple[int, ...]
"""For each rank, how many of its operations were done."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of one rank.

    Attributes:
        number: its place among the operations of all ranks, as they were recorded.
        path: relative to the root; of a descriptor, the name by which it was opened.
        target: the new name of ``link`` and ``rename``.
        node: which file or directory; a file keeps its number when it is renamed.
        offset, data: of ``write``; ``truncate`` has the new length in ``offset``.
        heard: of ``hear``: operations that other ranks had done, ``(rank, count)``.
        request: of what one request to an object store does, and of the ``answer`` to it.
        upload: the unfinished upload that ``put`` completes, by a name of its own.
    """

    rank: int
    number: int
    kind: Kind
    path: str = ""
    target: str = ""
    node: int = -1
    offset: int = 0
    data: bytes = b""
    heard: tuple[int, int] | None = None
    request: int = -1
    upload: str = ""

    def __str__(self) -> str:
        if self.kind == "write":
            return f"write {len(self.data)} bytes to {self.path}"
        if self.kind == "truncate":
            return f"truncate {self.path} to {self.offset} bytes"
        if self.kind == "hear":
            assert self.heard is not None
            return f"hear from rank {self.heard[0]}"
        if self.kind == "acknowledge":
            return "the save returns"
        if self.upload == self.path != "":
            return f"begin an upload to {self.path.partition(UPLOAD)[0]}"
        if self.upload:
            return f"complete the upload of {len(self.data)} bytes to {self.path}"
        if self.kind in ("put", "put new"):
            condition = ", which must be new" if self.kind == "put new" else ""
            return f"put {len(self.data)} bytes to {self.path}{condition}"
        if self.kind == "answer":
            return "hear that it was done"
        return f"{self.kind} {self.path}{f' to {self.target}' if self.target else ''}"


@dataclass(frozen=True)
class Recording:
    """The operations of one save, by rank.

    Attributes:
        ranks: each rank's operations in order.
        before: what was there before, durable: path to bytes, or None for a directory.
        nodes: the number of every path of ``before``.
    """

    ranks: Sequence[Sequence[Operation]]
    before: Mapping[str, bytes | None] = field(default_factory=dict)
    nodes: Mapping[str, int] = field(default_factory=dict)

    @property
    def end(self) -> Cut:
        """Everything was done."""
        return tuple(len(operations) for operations in self.ranks)

    @cached_property
    def _clocks(self) -> list[list[Cut]]:
        """For each operation the smallest cut that has it."""
        clocks: list[list[Cut]] = [[] for _ in self.ranks]
        for operation in sorted((o for ops in self.ranks for o in ops), key=lambda o: o.number):
            own = clocks[operation.rank]
            clock = list(own[-1] if own else (0,) * len(self.ranks))
            clock[operation.rank] = len(own) + 1
            if operation.heard and operation.heard[1]:
                sender, count = operation.heard
                known = clocks[sender][count - 1]
                clock = [max(one, other) for one, other in zip(clock, known, strict=True)]
            own.append(tuple(clock))
        return clocks

    def needed(self, rank: int, count: int) -> Cut:
        """The smallest cut in which ``rank`` has done ``count`` operations."""
        return self._clocks[rank][count - 1] if count else (0,) * len(self.ranks)

    def closed(self, cut: Sequence[int]) -> Cut:
        """The smallest cut that has ``cut`` and all that its ranks had heard of."""
        needs = [self.needed(rank, count) for rank, count in enumerate(cut)]
        return tuple(max(column) for column in zip(*needs, strict=True))

    def is_before(self, one: Operation, other: Operation) -> bool:
        """Whether ``one`` was certainly done when ``other`` was."""
        place = self.place(other)
        return self._clocks[other.rank][place][one.rank] > self.place(one)

    def place(self, operation: Operation) -> int:
        """Where the operation stands among those of its rank."""
        return self._places[operation.number]

    @cached_property
    def _places(self) -> dict[int, int]:
        return {o.number: place for ops in self.ranks for place, o in enumerate(ops)}

    def done(self, cut: Cut) -> list[Operation]:
        """The operations of a cut, in the order in which they were recorded."""
        found = [o for ops, count in zip(self.ranks, cut, strict=True) for o in ops[:count]]
        return sorted(found, key=lambda operation: operation.number)
