"""A state of an object store, decided object by object as recovery lists and reads.

Guarantees: `ObjectState` is what the store's protocol asks of objects
(`seatrial.recovery.storage.objects.Objects`). What recovery itself writes and deletes is found
again, and changes nothing of what is decided.

Does not: fail, or take more than one thread at a time.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence

from seatrial.recovery.errors import DamagedCheckpointError

from .choices import Choices
from .disk import Change, Option
from .object_model import ObjectModel
from .operations import UPLOAD
from .symmetry import NONE, Symmetry

__all__ = ["ObjectState"]


class ObjectState(Choices):
    """The objects of one state."""

    url = "crash://state"
    threads = 1

    def __init__(
        self,
        model: ObjectModel,
        choices: tuple[int, ...],
        symmetry: Symmetry = NONE,
        *,
        late: bool = False,
    ) -> None:
        super().__init__(model, symmetry, choices)
        self._late = late
        self._landed: set[int] = set()
        self._model = model
        own = symmetry.paths
        self._in_order = [*sorted(set(model.paths).difference(own)), *own]
        self._uploads = model.uploads()
        self._found: dict[str, bytes | None] = {}
        self._now: dict[str, bytes | None] = {}
        """What recovery has written, None for what it has deleted."""

    # What the exploration asks

    def decide_everything(self) -> None:
        self._look(self._in_order)

    def visible(self) -> dict[str, bytes | None]:
        return {name: held for name, held in self._found.items() if held is not None}

    def missing(self) -> tuple[str, ...]:
        return tuple(name for name, held in self._found.items() if held is None)

    # What the protocol asks

    def prove(self) -> None:
        pass

    def sizes(self, prefix: str = "") -> dict[str, int]:
        uploads = set(self._uploads)
        self._look(n for n in self._in_order if n.startswith(prefix) and n not in uploads)
        held = self._held()
        return {
            name: len(content)
            for name, content in held.items()
            if content is not None and name.startswith(prefix) and name not in uploads
        }

    def get(self, name: str, bytes_max: int) -> bytes:
        self._look([name])
        content = self._held().get(name)
        if content is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", f"{self.url}/{name}")
        return content[:bytes_max]

    def read_into(self, name: str, offset: int, target: memoryview, size_bytes: int) -> None:
        content = self.get(name, size_bytes + 1)
        if len(content) != size_bytes:
            raise DamagedCheckpointError(
                f"{self.url}/{name} has {len(content)} bytes where {size_bytes} were stored"
            )
        target[:] = content[offset : offset + len(target)]

    def put(self, name: str, data: bytes) -> None:
        self._look([name])
        self._now[name] = bytes(data)

    def create(self, name: str, data: bytes) -> bool:
        self._look([name])
        if self._held().get(name) is None:
            self._now[name] = bytes(data)
        return self._held()[name] == data

    def upload(self, name: str, size_bytes: int) -> _Sink:
        return _Sink(self, name, size_bytes)

    def delete(self, names: Sequence[str]) -> None:
        self._look(names)
        self._now |= dict.fromkeys(names)

    def uploads(self) -> list[tuple[str, str]]:
        self._look(self._uploads)
        held = self._held()
        there = [upload for upload in self._uploads if held[upload] is not None]
        return [(upload.partition(UPLOAD)[0], upload) for upload in there]

    def abort(self, name: str, upload: str) -> None:
        self._look([upload])
        self._now[upload] = None

    def _held(self) -> dict[str, bytes | None]:
        return self._found | self._now

    def _look(self, names: Iterable[str]) -> None:
        """Decide which of the versions of each object is there."""
        for name in names:
            if name in self._found:
                if self._late:
                    self._wait(name)
                continue
            node = self.choose(self._model.names(name, self.given), name)
            assert node is None or isinstance(node, int)
            self.pass_over(name)
            self._found[name] = None if node is None else self._model.content(node)

    def _wait(self, name: str) -> None:
        """Since recovery has last looked, a request that was in flight may have happened."""
        for change in self._model.steps(name):
            if change.number in self._landed:
                continue
            in_flight = self._model.in_flight(change, self.given)
            if in_flight is None:
                continue
            options = [Option(False, self.given, 0), Option(True, in_flight, 1)]
            if self.choose(options, ""):
                self._land(change)

    def _land(self, change: Change) -> None:
        self._landed.add(change.number)
        taken = self._held().get(change.operation.path) is not None  # if only by an empty object
        if change.operation.kind == "put new" and taken:
            return
        for name, node in change.names:
            self._now[name] = None if node is None else self._model.content(node)


class _Sink:
    """An object that recovery writes: there when it is finished."""

    threads: int | None = 1
    fsyncs = False

    def __init__(self, state: ObjectState, name: str, size_bytes: int) -> None:
        self._state = state
        self._name = name
        self._content = bytearray(size_bytes)

    def write_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        self._content[offset : offset + len(data)] = data

    def finish(self) -> None:
        self._state.put(self._name, bytes(self._content))

    def fsync(self) -> None:
        pass

    def abort(self) -> None:
        pass
