"""Every error that `seatrial.recovery` raises. Each message says what happened, where, and what
the reader can do; callers may rely on the classes, not on the wording."""

from __future__ import annotations

__all__ = [
    "AlreadyPublishedError",
    "CheckpointError",
    "CollectiveMismatchError",
    "DamagedCheckpointError",
    "DamagedRecordError",
    "ManifestError",
    "MismatchError",
    "NoValidCheckpointError",
    "RecoveryError",
    "ReplicaMismatchError",
    "SaveError",
    "SilentRanksError",
    "StateError",
    "StorageUnsupportedError",
    "TopologyError",
]


class RecoveryError(Exception):
    """Base of all errors of this package."""


class TopologyError(RecoveryError, ValueError):
    """A topology that does not parse or does not fit the world size."""


class StateError(RecoveryError):
    """A piece of training state that cannot be captured or put back."""


class CollectiveMismatchError(RecoveryError):
    """Two ranks called different collectives, so what they computed since cannot be relied on."""


class DamagedRecordError(RecoveryError):
    """A record of the data that is missing or does not have its digest."""


class CheckpointError(RecoveryError):
    """Base of everything that goes wrong with a stored checkpoint."""


class SilentRanksError(CheckpointError):
    """``ranks`` did not report in time: they died, hang, or their storage does."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class SaveError(CheckpointError):
    """A save failed on some rank; nothing was published."""


class AlreadyPublishedError(SaveError):
    """Another attempt published this step first; the loser's files are leftovers."""


class ReplicaMismatchError(SaveError):
    """Ranks that should hold equal copies of a tensor do not; nothing was published."""


class StorageUnsupportedError(CheckpointError):
    """The storage cannot publish exclusively, so a manifest would not be a commit."""


class ManifestError(CheckpointError):
    """A manifest that is not whole or does not follow the schema."""


class DamagedCheckpointError(CheckpointError):
    """Stored bytes that are missing or differ from the digest in the manifest."""


class NoValidCheckpointError(CheckpointError):
    """Checkpoints were published, and none of them is valid any more."""


class MismatchError(CheckpointError):
    """The checkpoint and the state to restore do not hold the same tensors."""
