"""What the store asks of a place where checkpoints are kept: the one seam between them.

The protocol of saving, restoring and deleting is written once, on top of this; a `Storage` says how
each of its steps is done on a file system or an object store. Names of steps, attempts and files
are those of `seatrial.recovery.storage.names`.

Guarantees that every implementation gives:

- what `Sink.finish` (and, where ``fsyncs`` is true, `Sink.fsync`, `Files.fsync` and
  `Attempt.fsync`) returned from survives a crash of everything but the storage itself;
- `Attempt.publish` publishes a step at most once, whole, and only from the attempt that began it;
- an attempt whose files were collected cannot publish any more;
- a step disappears at once, and before any of its files does;
- failures are `OSError`, or the classes of `seatrial.recovery.errors`. Transient ones were tried
  again where that is safe.

Torch-free. Called by the store, its tools, and the storage for `torch.distributed.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from .retry import RetryPolicy

__all__ = ["Attempt", "Contents", "Files", "Sink", "Source", "Storage"]

Buffer = bytes | bytearray | memoryview


class Sink(Protocol):
    """A new file of known size that is being written; given up if left without `finish`."""

    @property
    def threads(self) -> int | None:
        """How many threads may write, in any order; 1: in the order of bytes; None: any number."""

    @property
    def fsyncs(self) -> bool:
        """Whether `finish` leaves something for `fsync` to do."""

    def write_at(self, data: Buffer, offset: int) -> None:
        """Write all of ``data``; it may be changed afterwards."""

    def finish(self) -> None:
        """Complete the file; raises `OSError` unless it has the size that was announced."""

    def fsync(self) -> None:
        """Make the content durable."""


class Source(Protocol):
    """A file that is being read, by any number of threads."""

    @property
    def piece_bytes(self) -> int:
        """How much to ask for at a time."""

    @property
    def threads(self) -> int | None:
        """How many threads read best; None for this rank's share of the processors."""

    @property
    def gather_bytes(self) -> int:
        """Neighbours are read together up to this length; 0: each by itself."""

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill ``target``; raises `DamagedCheckpointError` if the file ends before."""


class Files(Protocol):
    """The files of one attempt."""

    @property
    def retry(self) -> RetryPolicy:
        """How a failed read of a whole file is tried again."""

    @property
    def fsyncs(self) -> bool:
        """Whether `fsync` has something to do."""

    def path(self, name: str = "") -> str:
        """The full name of a file, or of what holds them, for messages and events."""

    def create(self, name: str, size_bytes: int) -> AbstractContextManager[Sink]:
        """Begin a file that must not exist yet."""

    def open(self, name: str, size_bytes: int) -> AbstractContextManager[Source]:
        """Read a file.

        Raises:
            DamagedCheckpointError: it has another size; at the latest, when it is read.
        """

    def fsync(self) -> None:
        """Make the names of the files durable."""


class Attempt(Protocol):
    """One attempt to save a step, seen from the coordinator; close it when it is over."""

    @property
    def name(self) -> str: ...

    def fsync(self) -> None:
        """Make what leads to the attempt durable; `publish` does if it was left out."""

    def publish(self, content: bytes, sizes: Mapping[str, int]) -> None:
        """Publish ``content`` as the step's manifest; it names files of these sizes in bytes.

        Raises:
            AlreadyPublishedError: another attempt won.
            SaveError: another attempt has collected this one's files, or some are not there.
        """

    def abandon(self) -> None:
        """Delete the attempt's files, as far as possible; no rank may still write."""

    def close(self) -> None:
        """Let go of whatever is held; may be called again."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a place holds, as one look found it; steps lowest first.

    Attributes:
        published: as `Storage.published`.
        noted: those of them that have a note.
        leftovers: as `Storage.leftovers`.
    """

    published: Sequence[int]
    noted: frozenset[int]
    leftovers: Sequence[str]


class Storage(Protocol):
    """Checkpoints of one run in one place. A missing place is an empty one."""

    @property
    def location(self) -> str:
        """The directory or URL."""

    @property
    def retry(self) -> RetryPolicy: ...

    def exists(self) -> bool:
        """Whether the place is there, whatever is in it."""

    def steps(self) -> Sequence[int]:
        """Every step that has files, published or not, lowest first."""

    def published(self) -> Sequence[int]:
        """The published steps, lowest first; their manifests may be damaged."""

    def is_published(self, step: int) -> bool: ...

    def manifest_path(self, step: int) -> str:
        """The full name of the step's manifest, for messages and events."""

    def read_manifest(self, step: int, bytes_max: int) -> bytes:
        """At most ``bytes_max`` bytes of the manifest.

        Raises:
            DamagedCheckpointError: it is missing or unreadable.
            OSError: anything else, which says nothing about it.
        """

    def read_note(self, step: int) -> bytes:
        """What `write_note` wrote for the published step; raises `OSError` if nothing."""

    def write_note(self, step: int, content: bytes) -> None:
        """Replace the note on the published step; it need not be durable."""

    def quarantined(self) -> Sequence[str]:
        """The names of the damaged checkpoints that were set aside."""

    def leftovers(self) -> Sequence[str]:
        """What no published manifest names, relative to `location`."""

    def contents(self) -> Contents: ...

    def files(self, step: int, attempt: str) -> Files: ...

    def prove(self) -> None:
        """Raise `StorageUnsupportedError` unless a step can be published exactly once here."""

    def begin(self, step: int) -> Attempt:
        """Begin an attempt to save ``step``.

        Raises:
            AlreadyPublishedError: the step is published.
            StorageUnsupportedError: the storage cannot publish exactly once.
        """

    def delete(self, leftovers: Sequence[str], steps: Sequence[int]) -> Sequence[str]:
        """Delete leftovers and published steps; what was deleted, relative to `location`."""

    def quarantine(self, step: int, reason: str) -> str:
        """Set the damaged ``step`` aside, with the reason beside it; its new name."""
