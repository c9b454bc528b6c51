"""Which states a file system may be in after a power loss, for operations that were recorded.

Two models. ``journal``: changes of names reach the disk in their order, as on ext4 and XFS.
``weak``: what POSIX promises, so each change of a name by itself, a rename in halves. In both, a
name is certain once its directory was fsynced after the change, and bytes once their file was.
Bytes that are not certain read as what was written, as nothing, as zeros or as their first half.

Where two ranks change names and neither had heard of the other, their order is that of the
recording only for one and the same name. Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal

from .operations import Cut, Operation, Recording

Model = Literal["journal", "weak", "objects"]
MODELS: tuple[Model, ...] = ("journal", "weak")
"""Those of file systems; ``objects`` is `seatrial.chaos.crashes.object_model`."""


@dataclass(frozen=True)
class Change:
    """One change of names that persists as a whole: ``(path, node or None)``."""

    number: int
    operation: Operation
    names: tuple[tuple[str, int | None], ...]


@dataclass(frozen=True)
class Assumptions:
    """What is taken to be so: how far each rank came at least and at most, and what persisted.

    ``changes`` maps the number of a change to whether it persisted.
    """

    least: Cut
    most: Cut
    changes: tuple[tuple[int, bool], ...] = ()


@dataclass(frozen=True)
class Option:
    """One thing that recovery may find, and what must be so for that.

    ``token`` says which one it is, alike for what symmetric ranks did.
    """

    found: object
    assumptions: Assumptions
    token: int


class Disk:
    """The states that ``model`` allows for a recording.

    Attributes:
        names: what a path may be in a directory that is there: a node, or None for absent.
        contents: what a file may hold: bytes, each once.
    """

    def __init__(self, recording: Recording, model: Model) -> None:
        self.recording = recording
        self.model = model
        # States have their beginnings in common, so most questions are asked many times.
        self.names = cache(self._names)
        self.contents = cache(self._contents)
        self.changes = list(_changes(recording, model))
        self._by_path: dict[str, list[tuple[Change, int | None]]] = {}
        for change in self.changes:
            for path, node in change.names:
                self._by_path.setdefault(path, []).append((change, node))
        operations = [o for ops in recording.ranks for o in ops]
        self._syncs = [o for o in operations if o.kind == "fsync"]
        self._writes: dict[int, list[Operation]] = {}
        for operation in sorted(operations, key=lambda o: o.number):
            if operation.kind in ("write", "truncate"):
                self._writes.setdefault(operation.node, []).append(operation)
        self._contents_before = {
            recording.nodes[path]: content
            for path, content in recording.before.items()
            if content is not None
        }
        self.files = {
            *self._contents_before,
            *(o.node for o in operations if o.kind == "create"),
        }

    @property
    def anything(self) -> Assumptions:
        """Nothing is known yet: any cut, any persistence."""
        return Assumptions((0,) * len(self.recording.ranks), self.recording.end)

    @cached_property
    def paths(self) -> list[str]:
        """Every path that is ever there."""
        return sorted({*self.recording.before, *self._by_path})

    def below(self, directory: str) -> list[str]:
        """The paths directly below ``directory`` that are ever there."""
        return [path for path in self.paths if os.path.dirname(path) == directory]

    def _names(self, path: str, given: Assumptions) -> list[Option]:
        options = []
        steps = self._by_path.get(path, [])
        # The last change that persisted decides.
        for last in range(len(steps), -1, -1):
            node = steps[last - 1][1] if last else self.recording.nodes.get(path)
            wanted = [(steps[last - 1][0], True)] if last else []
            wanted += [(change, False) for change, _ in steps[last:]]
            if (assumed := self._assume(given, wanted)) is not None:
                options.append(Option(node, assumed, last))
        return options

    def _contents(self, node: int, given: Assumptions) -> list[Option]:
        before = self._contents_before.get(node, b"")
        writes = self._writes.get(node, [])
        options = []
        for token, (content, done, certain) in enumerate(_readings(before, writes)):
            assumed = self._assume_content(given, writes[:done], writes[certain:])
            if assumed is not None:
                options.append(Option(content, assumed, token))
        return options

    def _assume_content(
        self, given: Assumptions, done: Sequence[Operation], uncertain: Sequence[Operation]
    ) -> Assumptions | None:
        """``done`` were done, and none of ``uncertain`` is certain."""
        least, most = list(given.least), list(given.most)
        for operation in done[-1:]:
            _raise(least, operation, self.recording)
        for operation in uncertain:
            for sync in self._syncs:
                if sync.node == operation.node and self.recording.is_before(operation, sync):
                    _lower(most, sync, self.recording)
        return self._consistent(least, most, given.changes)

    def _assume(
        self, given: Assumptions, wanted: Sequence[tuple[Change, bool]]
    ) -> Assumptions | None:
        known = dict(given.changes)
        least, most = list(given.least), list(given.most)
        for change, persisted in wanted:
            if known.setdefault(change.number, persisted) != persisted:
                return None
            if persisted:
                _raise(least, change.operation, self.recording)
            for sync in () if persisted else self._covers[change.number]:
                _lower(most, sync, self.recording)
        if self.model == "journal":
            yes = [self.changes[number] for number, persisted in known.items() if persisted]
            for number, persisted in known.items():
                if not persisted and any(self._is_ordered(self.changes[number], y) for y in yes):
                    return None
        return self._consistent(least, most, tuple(sorted(known.items())))

    def _consistent(
        self, least: Sequence[int], most: Sequence[int], changes: tuple[tuple[int, bool], ...]
    ) -> Assumptions | None:
        closed = self.recording.closed(least)
        if any(low > high for low, high in zip(closed, most, strict=True)):
            return None
        return Assumptions(closed, tuple(most), changes)

    @cached_property
    def _covers(self) -> list[list[Operation]]:
        """For each change the fsyncs after which it is certain."""
        own = [
            [
                sync
                for sync in self._syncs
                if sync.path in {os.path.dirname(path) for path, _ in change.names}
                and self.recording.is_before(change.operation, sync)
            ]
            for change in self.changes
        ]
        if self.model == "weak":
            return own
        # Whatever makes a change certain makes certain what was ordered before it.
        return [
            [s for later in self.changes for s in own[later.number] if self._is_ordered(one, later)]
            for one in self.changes
        ]

    def _is_ordered(self, one: Change, other: Change) -> bool:
        """Whether ``one`` reaches the disk no later than ``other``."""
        same = one.operation is other.operation
        return same or self.recording.is_before(one.operation, other.operation)

    def acknowledged(self, given: Assumptions) -> Assumptions | None:
        """``given``, and the save has returned on some rank; None if it cannot have."""
        for operation in (o for ops in self.recording.ranks for o in ops):
            if operation.kind != "acknowledge":
                continue
            least = list(given.least)
            _raise(least, operation, self.recording)
            if (assumed := self._consistent(least, given.most, given.changes)) is not None:
                return assumed
        return None


def _changes(recording: Recording, model: Model) -> Iterator[Change]:
    number = 0
    operations = sorted((o for ops in recording.ranks for o in ops), key=lambda o: o.number)
    for operation in operations:
        names: list[tuple[str, int | None]] = []
        if operation.kind in ("create", "mkdir"):
            names = [(operation.path, operation.node)]
        elif operation.kind in ("unlink", "rmdir"):
            names = [(operation.path, None)]
        elif operation.kind in ("put", "put new"):
            names = [(operation.path, operation.node)]
            if operation.upload and operation.upload != operation.path:
                names.append((operation.upload, None))
        elif operation.kind == "delete":
            names = [(operation.path, None)]
        elif operation.kind == "link":
            names = [(operation.target, operation.node)]
        elif operation.kind == "rename":
            names = [(operation.target, operation.node), (operation.path, None)]
        parts = [[name] for name in names] if model == "weak" else [names]
        for part in parts:
            if part:
                yield Change(number, operation, tuple(part))
                number += 1


def _readings(before: bytes, writes: Sequence[Operation]) -> Iterator[tuple[bytes, int, int]]:
    """What a file may read as; how many writes were done; how many of them are certain at most."""
    for count in range(len(writes), -1, -1):
        yield _apply(before, writes[:count]), count, count
        last = writes[count - 1] if count else None
        if last is None or last.kind != "write" or not last.data:
            continue
        intact = _apply(before, writes[: count - 1])
        zeros = replace(last, data=bytes(len(last.data)))
        half = replace(last, data=last.data[: len(last.data) // 2])
        for torn in (zeros, half):
            yield _apply(intact, [torn]), count, count - 1
        if count < len(writes):  # the later ones reached the disk before this one
            yield _apply(intact, [zeros, *writes[count:]]), len(writes), count - 1


def _apply(content: bytes, writes: Sequence[Operation]) -> bytes:
    held = bytearray(content)
    for write in writes:
        end = write.offset + len(write.data)
        held.extend(bytes(max(0, write.offset - len(held))))
        if write.kind == "truncate":
            del held[write.offset :]
        else:
            held[write.offset : end] = write.data
    return bytes(held)


def _raise(least: list[int], operation: Operation, recording: Recording) -> None:
    place = recording.place(operation)
    least[operation.rank] = max(least[operation.rank], place + 1)


def _lower(most: list[int], operation: Operation, recording: Recording) -> None:
    place = recording.place(operation)
    most[operation.rank] = min(most[operation.rank], place)
