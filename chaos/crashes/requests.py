"""Runs a save on every rank, each in a thread of this process, and records its requests.

The requests are the operations that every backend of the store performs
(`seatrial.recovery.probe.perform`): S3, memory, whatever fsspec knows. They are recorded as the
model of an object store has them (`seatrial.chaos.crashes.object_model`), so a file that a backend
writes piece by piece is there when it is complete, and an unfinished upload until then.

Guarantees: the recorded requests, applied to what was there before, give exactly what is there
now; otherwise `record_objects` raises. It raises as well if a thread of no rank, such as a helper
of a save, has changed anything, even if nothing is left of that; from any thread may come parts of
an upload that a rank has begun, and the race by which a file system proves itself. A rank has heard
of whatever wrote an object that it has read; what it saw in a listing is not taken for that, which
makes for more states.

Does not: see what goes past the store's storage, such as a client of your own. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from seatrial.recovery.probe import interpose
from seatrial.recovery.storage import open_storage
from seatrial.recovery.storage.names import PROBE_PREFIX
from seatrial.recovery.storage.objects import Objects, ObjectStorage

from ..errors import ChaosError
from .hearing import Hearing, Save
from .operations import UPLOAD, Recording

__all__ = ["record_objects"]

_OBJECT_BYTES_MAX = 64 << 20
_CHANGES_NOTHING = {"storage/read", "storage/list", "storage/stat"}


def record_objects(
    location: str, saves: Sequence[Save], *, options: Mapping[str, object] | None = None
) -> Recording:
    """Run ``saves[rank](messages)`` for all ranks at once, into objects below the URL ``location``.

    What is there before is taken as durable. When a save returns, the rank acknowledges.

    Raises:
        ChaosError: a save failed, ``location`` is no object store, or something was written that
            could not be seen, or in a thread of no rank.
    """
    storage = open_storage(location, options=options)
    if not isinstance(storage, ObjectStorage):
        raise ChaosError(f"{location} is a directory; record what is done to it by `record`")
    recorder = _Recorder(storage.objects, len(saves))
    stop = interpose(recorder)
    try:
        recorder.run(saves)
    finally:
        stop()
    recorder.require_complete()
    return Recording(recorder.ranks, recorder.before, recorder.nodes_before)


class _Recorder(Hearing):
    """Performs every operation, one at a time, and notes what it did."""

    def __init__(self, objects: Objects, ranks: int) -> None:
        super().__init__(ranks)
        self._objects = objects
        self.before: dict[str, bytes | None] = dict(self._contents())
        self.nodes_before = {name: node for node, name in enumerate(self.before, start=1)}
        self._nodes = len(self.nodes_before) + 1
        self._written: dict[str, tuple[int, int]] = {}  # by whom, and how many operations it had
        self._uploads: dict[str, tuple[int, str]] = {}  # rank and name of what is unfinished
        self._requests = 0
        self._now: dict[str, bytes] = {k: v for k, v in self.before.items() if v is not None}

    def _contents(self) -> dict[str, bytes]:
        sizes = self._objects.sizes()
        return {name: self._objects.get(name, _OBJECT_BYTES_MAX) for name in sorted(sizes)}

    def perform(
        self, event: str, do: Callable[[Any], Any], data: Any, lost: Any, facts: dict[str, object]
    ) -> Any:
        """As `seatrial.recovery.probe.perform` says."""
        file = str(facts["file"])
        name = file.removeprefix(self._objects.url).removeprefix("/")
        is_below = file == self._objects.url or file.startswith(f"{self._objects.url}/")
        rank = self.rank
        if rank is None or not is_below:
            if is_below and not self._is_harmless(event, name):
                names = cast(Sequence[str], facts.get("names", [name]))
                self.is_strange(f"{event.removeprefix('storage/')} {', '.join(names)}")
            return do(data)
        with self.lock:
            result = do(data)
            self._note(rank, event.removeprefix("storage/"), name, data, facts.get("names"))
            return result

    def _is_harmless(self, event: str, name: str) -> bool:
        """Whether it may come from a thread of no rank."""
        if event == "storage/write":
            return name in self._uploads  # a part of it
        if event == "storage/publish":
            return name.startswith(PROBE_PREFIX)
        return event in _CHANGES_NOTHING

    def _note(self, rank: int, event: str, name: str, data: Any, names: Any) -> None:
        upload = self._uploads.get(name)
        if event == "create":
            self._uploads[name] = rank, f"{name}{UPLOAD}{self._requests}"
            self._put(rank, self._uploads[name][1], b"", upload=self._uploads[name][1])
        elif event == "write" and upload is None:
            self._put(rank, name, bytes(data))
        elif event == "publish":
            self._put(rank, name, bytes(data), kind="put new")
        elif event == "commit" and upload is not None:
            del self._uploads[name]
            self._put(rank, name, self._read(name), upload=upload[1])
        elif event == "delete" and upload is not None:
            del self._uploads[name]
            self._delete(rank, [upload[1]])
        elif event == "delete":
            self._delete(rank, [name] if names is None else names)
        elif event == "read" and name in self._written:
            self.heard(rank, self._written[name])

    def _read(self, name: str) -> bytes:
        """Past the recorder; parts of an upload come in any order."""
        rank, self.thread.rank = getattr(self.thread, "rank", None), None
        try:
            return self._objects.get(name, _OBJECT_BYTES_MAX)
        finally:
            self.thread.rank = rank

    def _put(
        self, rank: int, name: str, data: bytes, *, kind: Any = "put", upload: str = ""
    ) -> None:
        self.note(
            rank, kind, path=name, data=data, node=self._nodes, upload=upload,
            request=self._requests,
        )  # fmt: skip
        self._nodes += 1
        if name != upload:
            self._now[name] = data
        self._answered(rank, [name])

    def _delete(self, rank: int, names: Sequence[str]) -> None:
        for name in names:
            self.note(rank, "delete", path=name, request=self._requests)
            self._now.pop(name, None)
        self._answered(rank, names)

    def _answered(self, rank: int, names: Sequence[str]) -> None:
        self.note(rank, "answer", request=self._requests)
        for name in names:
            self._written[name] = rank, len(self.ranks[rank])
        self._requests += 1

    def require_complete(self) -> None:
        self.require_no_strangers()
        there = self._contents()
        if there != self._now:
            names = sorted(there.keys() | self._now.keys())
            wrong = next(name for name in names if there.get(name) != self._now.get(name))
            raise ChaosError(
                f"{self._objects.url}/{wrong} was written past the recorder, so its crash states "
                "are not known"
            )
