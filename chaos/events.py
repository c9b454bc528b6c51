"""The named points of a rank's execution at which a fault may strike, and how to name them.

An event name is a path such as ``backward`` or ``checkpoint/manifest/link``. `At` selects events:
``backward``, ``step:12/backward``, ``step:10/checkpoint/*``. This table is the only place that
knows which events exist, who reaches them, and in which order a save or a restore runs through
them; it is also printed in the documentation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from .errors import FaultSyntaxError

Stage = Literal["process", "step", "checkpoint", "restore", "storage", "collective"]


@dataclass(frozen=True)
class Event:
    """One kind of event.

    ``coordinator_only`` events are reached by rank 0 alone, ``directory_only`` ones where the store
    is a directory: an object store has no such step.
    """

    name: str
    stage: Stage
    meaning: str
    coordinator_only: bool = False
    directory_only: bool = False


RECORD = "data/record"
"""The event whose bytes are in hand."""

EVENTS = (
    Event("start", "process", "the rank's process runs, its process group does not exist yet"),
    Event("exit", "process", "the rank has finished its work and is about to leave"),
    Event("step", "step", "one whole optimizer step, without its checkpoint"),
    Event("data", "step", "the next batch is fetched"),
    Event(RECORD, "step", "one record of a `RecordFile` has been read, its digest is not checked"),
    Event("forward", "step", "forward pass of one micro-batch"),
    Event("backward", "step", "backward pass of one micro-batch"),
    Event("optimizer", "step", "unscale, clip, optimizer, scaler and scheduler step"),
    Event("checkpoint", "checkpoint", "one whole save"),
    Event("checkpoint/shard/write", "checkpoint", "a shard file is written"),
    Event(
        "checkpoint/shard/fsync", "checkpoint", "a shard file is made durable", directory_only=True
    ),
    Event(
        "checkpoint/directory/fsync",
        "checkpoint",
        "the shard's name is made durable",
        directory_only=True,
    ),
    Event("checkpoint/report", "checkpoint", "a rank reports size and digests"),
    Event("checkpoint/gather", "checkpoint", "the coordinator has to hear of every rank", True),
    Event(
        "checkpoint/manifest/write", "checkpoint", "the manifest's bytes are written", True, True
    ),
    Event(
        "checkpoint/manifest/fsync", "checkpoint", "the manifest's bytes are durable", True, True
    ),
    Event("checkpoint/manifest/link", "checkpoint", "the commit: the manifest gets its name", True),
    Event(
        "checkpoint/manifest/directory", "checkpoint", "the manifest's name is durable", True, True
    ),
    Event("checkpoint/acknowledge", "checkpoint", "every rank learns that the save is committed"),
    Event("checkpoint/collect", "checkpoint", "old generations and leftovers are deleted", True),
    Event("restore", "restore", "one whole restore from one generation"),
    Event("restore/manifest/read", "restore", "the manifest is read"),
    Event("restore/shard/read", "restore", "a file is read and its digests are checked"),
    Event("restore/agree", "restore", "all ranks agree that the generation is valid"),
    Event("restore/load", "restore", "scheduler, scaler, sampler and RNG are put back"),
    Event("restore/quarantine", "restore", "a damaged generation is set aside", True),
    Event("storage/create", "storage", "a file or a multipart upload is begun"),
    Event("storage/write", "storage", "bytes are written to a file, or a whole object is put"),
    Event("storage/commit", "storage", "an upload, or a file of fsspec, is completed"),
    Event("storage/sync", "storage", "a file or directory is fsynced", directory_only=True),
    Event("storage/publish", "storage", "a name is created exclusively: a link or conditional PUT"),
    Event("storage/rename", "storage", "a file or directory is renamed", directory_only=True),
    Event("storage/read", "storage", "bytes of a file or object are read"),
    Event("storage/list", "storage", "names are listed"),
    Event("storage/stat", "storage", "it is asked whether a file is there, or its size"),
    Event("storage/delete", "storage", "a file, object or upload is deleted"),
    *(
        Event(f"collective/{name}", "collective", meaning)
        for name, meaning in {
            "all_reduce": "a reduction that every rank gets",
            "all_reduce_coalesced": "several of them in one call",
            "broadcast": "a tensor of one rank for all",
            "reduce": "a reduction that one rank gets",
            "all_gather": "a tensor of every rank for all, in a list",
            "all_gather_into_tensor": "the same, in one tensor",
            "all_gather_into_tensor_coalesced": "several of them in one call",
            "reduce_scatter": "a reduction of which every rank gets a part, from a list",
            "reduce_scatter_tensor": "the same, from one tensor",
            "reduce_scatter_tensor_coalesced": "several of them in one call",
            "all_to_all": "a tensor from each rank to each",
            "all_to_all_single": "the same, in one tensor",
            "gather": "a tensor of every rank for one",
            "scatter": "a tensor for every rank from one",
            "barrier": "ranks wait for each other",
            "send": "a message to one rank",
            "recv": "a message from one rank",
            "recv_any": "a message from any rank",
        }.items()
    ),
)

STORAGE = "storage/"
COLLECTIVE = "collective/"
"""How operations of the storage are named, and collectives and messages; only a pattern that begins
so selects them."""

COMMIT_PROTOCOL = tuple(event for event in EVENTS if event.stage == "checkpoint")
"""Every event of a save, outermost first, then in order."""

_STEP = re.compile(r"step:(\d+)(?:/(.+))?")


@dataclass(frozen=True)
class At:
    """Which events a fault waits for: a name or glob pattern, in one step or in any."""

    name: str
    step: int | None = None

    def __post_init__(self) -> None:
        # Whitespace and ';' are legal in a glob's brackets, but they separate words and faults.
        if not self.events() or re.search(r"[\s;]", self.name) or (self.step or 0) < 0:
            names = ", ".join(event.name for event in EVENTS)
            raise FaultSyntaxError(f"at={str(self)!r} names no event; the events are {names}")

    @classmethod
    def parse(cls, text: str) -> At:
        """Read ``backward``, ``step:12``, ``step:12/backward`` or ``step:10/checkpoint/*``.

        Raises:
            FaultSyntaxError: no event has such a name.
        """
        match = _STEP.fullmatch(text)
        return cls(match[2] or "step", int(match[1])) if match else cls(text)

    def __str__(self) -> str:
        if self.step is None:
            return self.name
        return f"step:{self.step}" if self.name == "step" else f"step:{self.step}/{self.name}"

    def events(self) -> tuple[Event, ...]:
        """The kinds of event that can match."""
        return tuple(event for event in EVENTS if self._selects(event.name))

    def matches(self, name: str, step: int | None) -> bool:
        """Whether the event ``name`` in ``step`` is one that the fault waits for."""
        return (self.step is None or self.step == step) and self._selects(name)

    @property
    def is_storage(self) -> bool:
        """Whether it selects operations of the storage."""
        return self.name.startswith(STORAGE)

    def _selects(self, name: str) -> bool:
        return fnmatchcase(name, self.name) and all(
            name.startswith(family) == self.name.startswith(family)
            for family in (STORAGE, COLLECTIVE)
        )
