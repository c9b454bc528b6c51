"""Ranks that did the same, and the states that differ only in which of them did how much of it.

Two ranks are symmetric if exchanging them, and the paths that each alone has touched, leaves the
recording as it is: the same operations of the same lengths in the same order, and the same
knowledge of every rank about every other at each of them. Names of such paths may differ in their
numbers, as those of shards do, and in nothing else: whoever writes the index is not like whoever
writes a shard. That is checked, operation by operation.
Then any state with the two exchanged is a state as well, and one of both is enough, **if recovery
treats ranks alike**: that is taken on the word of whoever asks for it.

Of states that are equal up to such exchanges the one is tried in which a rank is never behind the
next of its class, compared decision by decision. Torch-free.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from .operations import UPLOAD, Operation, Recording

__all__ = ["NONE", "Order", "Symmetry", "symmetry_of"]

Token = tuple[object, ...]

_HARMLESS = frozenset({"fsync", "hear", "answer", "acknowledge"})
_CLOSED = -1
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Symmetry:
    """Classes of symmetric ranks, of two or more each, and the paths that are one rank's own."""

    classes: tuple[tuple[int, ...], ...] = ()
    own: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """For each of these ranks its paths; the same place in two ranks' means the same."""

    @property
    def paths(self) -> list[str]:
        """All own paths, rank by rank, class by class."""
        return [path for each in self.classes for rank in each for path in self.own[rank]]


NONE = Symmetry()


def symmetry_of(recording: Recording) -> Symmetry:
    """The symmetric ranks of ``recording``."""
    view = _View(recording)
    parent = list(range(len(recording.ranks)))

    def root(rank: int) -> int:
        while parent[rank] != rank:
            rank = parent[rank]
        return rank

    for one, other in combinations(parent.copy(), 2):
        if root(one) != root(other) and view.may_exchange(one, other):
            parent[root(other)] = root(one)
    members: dict[int, list[int]] = {}
    for rank in range(len(parent)):
        members.setdefault(root(rank), []).append(rank)
    classes = tuple(tuple(ranks) for ranks in members.values() if len(ranks) > 1)
    return Symmetry(classes, {rank: tuple(view.own[rank]) for each in classes for rank in each})


class _View:
    """A recording without what has no effect of its own, and without the numbers in names."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        ranks = range(len(recording.ranks))
        touched: dict[str, set[int]] = {}
        for operation in (o for ops in recording.ranks for o in ops):
            for path in _paths(operation):
                touched.setdefault(path, set()).add(operation.rank)
        self.own: list[list[str]] = [[] for _ in ranks]
        for rank in ranks:
            for operation in recording.ranks[rank]:
                for path in _paths(operation):
                    if touched[path] == {rank} and path not in self.own[rank]:
                        self.own[rank].append(path)
            # What recovery may never look at comes last, or nothing behind it could be compared.
            self.own[rank].sort(key=lambda path: UPLOAD in path)
        self._effects = [[o for o in ops if o.kind != "hear"] for ops in recording.ranks]
        # How many effects there are among the first operations of a rank.
        self._counts = [[0, *_running(o.kind != "hear" for o in ops)] for ops in recording.ranks]
        self._changed = {
            rank: {p for o in recording.ranks[rank] if o.kind not in _HARMLESS for p in _paths(o)}
            for rank in ranks
        }

    def may_exchange(self, one: int, other: int) -> bool:
        if len(self._effects[one]) != len(self._effects[other]):
            return False
        if self._changed[one] & self._changed[other]:
            return False  # which came first is decided by the recording
        image = list(range(len(self._effects)))
        image[one], image[other] = other, one
        return all(
            self._shape(operation) == self._shape(counterpart)
            and self._known(operation) == [self._known(counterpart)[rank] for rank in image]
            for rank in image
            for operation, counterpart in zip(
                self._effects[rank], self._effects[image[rank]], strict=True
            )
        )

    def _known(self, operation: Operation) -> list[int]:
        """How many effects of every rank are certain when ``operation`` is done."""
        place = self._recording.place(operation)
        clock = self._recording.needed(operation.rank, place + 1)
        return [self._counts[rank][count] for rank, count in enumerate(clock)]

    def _shape(self, operation: Operation) -> Token:
        names = [self._name(operation.rank, path) for path in _paths(operation)]
        return operation.kind, *names, operation.offset, len(operation.data)

    def _name(self, rank: int, path: str) -> Token:
        own = self.own[rank]
        if path not in own:
            return (path,)
        held = self._recording.before.get(path)
        there = None if path not in self._recording.before else held is None or len(held)
        directory, name = os.path.split(path)
        kind = _NUMBER.sub("0", name)
        return own.index(path), kind, self._name(rank, directory), there


def _paths(operation: Operation) -> list[str]:
    return [path for path in (operation.path, operation.target, operation.upload) if path]


def _running(flags: Iterator[bool]) -> Iterator[int]:
    count = 0
    for flag in flags:
        count += flag
        yield count


class Order:
    """What is decided about the own paths of symmetric ranks, as tokens in their order."""

    def __init__(self, symmetry: Symmetry) -> None:
        self._classes = symmetry.classes
        self._place = {
            path: (rank, place)
            for rank, paths in symmetry.own.items()
            for place, path in enumerate(paths)
        }
        self._decided: dict[int, list[list[int]]] = {
            rank: [[] for _ in paths] for rank, paths in symmetry.own.items()
        }
        self._neighbours = {
            rank: (each[index - 1] if index else None, each[index + 1 : index + 2])
            for each in symmetry.classes
            for index, rank in enumerate(each)
        }

    def concerns(self, path: str) -> bool:
        """Whether it is a symmetric rank's own."""
        return path in self._place

    def allows(self, path: str, token: int) -> bool:
        """Whether no rank would be ahead of the one before it, as to a path that `concerns`."""
        rank, place = self._place[path]
        decided = self._decided[rank]
        mine = [*decided[:place], [*decided[place], token], *decided[place + 1 :]]
        before, after = self._neighbours[rank]
        if before is not None and _is_ahead(mine, self._decided[before]):
            return False
        return not any(_is_ahead(self._decided[each], mine) for each in after)

    def note(self, path: str, token: int) -> None:
        if path in self._place:
            rank, place = self._place[path]
            self._decided[rank][place].append(token)

    def close(self, path: str) -> None:
        """Nothing more will be decided about ``path``."""
        self.note(path, _CLOSED)

    def permutations(self) -> int:
        """In how many ways the ranks of each class can be exchanged with a different result."""
        found = 1
        for each in self._classes:
            alike = Counter(str(self._decided[rank]) for rank in each)
            found *= math.factorial(len(each))
            for count in alike.values():
                found //= math.factorial(count)
        return found


def _is_ahead(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> bool:
    """Whether ``one`` is certainly above ``other`` by the first decision that differs."""
    for mine, theirs in zip(one, other, strict=True):
        for a, b in zip(mine, theirs, strict=False):
            if a != b:
                return a > b
        # What is not closed may yet have another decision, so nothing is known beyond.
        if len(mine) != len(theirs) or not mine or mine[-1] != _CLOSED:
            return False
    return False
