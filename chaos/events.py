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

Stage = Literal["process", "step", "checkpoint", "restore"]


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
)

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
        return tuple(event for event in EVENTS if fnmatchcase(event.name, self.name))

    def matches(self, name: str, step: int | None) -> bool:
        """Whether the event ``name`` in ``step`` is one that the fault waits for."""
        return (self.step is None or self.step == step) and fnmatchcase(name, self.name)
