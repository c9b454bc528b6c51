"""Which states an object store may be in after a crash of its clients, for recorded requests.

The model ``objects`` is S3 as documented: each PUT, each completion of an upload and each deletion
of one object happens as a whole, and is there for good once it was answered. One that was sent and
not answered may have happened or not; so may each object of a deletion of many by itself. Requests
of two clients for one object, of which neither had heard of the other, happen in either order. A
conditional PUT that was refused did nothing. There are no directories and no half objects.

What was sent by a client that died may also happen later, while recovery is under way: such
requests are those that `ObjectModel.in_flight` allows.

Does not: lose what was answered. Torch-free.
"""

from __future__ import annotations

from functools import cached_property

from .disk import Assumptions, Change, Disk, Option
from .operations import Operation, Recording

__all__ = ["ObjectModel"]


class ObjectModel(Disk):
    """The states that a recording by `seatrial.chaos.crashes.requests` allows.

    A path is the name of an object, or of an unfinished upload as `Operation.upload` has it.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording, "objects")
        self._answers = {o.request: o for ops in recording.ranks for o in ops if o.kind == "answer"}
        for operation in (o for ops in recording.ranks for o in ops if o.kind.startswith("put")):
            self._written[operation.node] = operation.data

    @cached_property
    def _written(self) -> dict[int, bytes]:
        before = self.recording.before
        return {node: before[path] or b"" for path, node in self.recording.nodes.items()}

    def uploads(self) -> list[str]:
        """Every upload that is ever unfinished."""
        operations = [o for ops in self.recording.ranks for o in ops]
        return sorted({o.path for o in operations if o.kind == "put" and o.path == o.upload})

    def steps(self, path: str) -> list[Change]:
        """Everything that may happen to an object, as it was recorded."""
        return [change for change, _ in self._by_path.get(path, [])]

    def in_flight(self, change: Change, given: Assumptions) -> Assumptions | None:
        """``given``, and the request was sent and did not happen yet; None if that cannot be."""
        if (assumed := self._assume(given, [(change, False)])) is None:
            return None
        least = list(assumed.least)
        operation = change.operation
        least[operation.rank] = max(least[operation.rank], self.recording.place(operation) + 1)
        return self._consistent(least, assumed.most, assumed.changes)

    def content(self, node: int) -> bytes:
        """What the object holds; it never changes."""
        return self._written[node]

    def _names(self, path: str, given: Assumptions) -> list[Option]:
        steps = self._by_path.get(path, [])
        options = []
        before = self._assume(given, [(change, False) for change, _ in steps])
        for token, (change, node) in reversed(list(enumerate(steps, start=1))):
            # Whatever certainly comes after it has not happened; of the rest it was the last.
            later = [
                (other, False)
                for other, _ in steps
                if other is not change
                and self.recording.is_before(change.operation, other.operation)
            ]
            if (assumed := self._assume(given, [(change, True), *later])) is not None:
                options.append(Option(node, assumed, token))
        if before is not None:
            options.append(Option(self.recording.nodes.get(path), before, 0))
        return options

    @cached_property
    def _covers(self) -> list[list[Operation]]:
        return [
            [answer] if (answer := self._answers.get(change.operation.request)) else []
            for change in self.changes
        ]
