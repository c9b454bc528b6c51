"""What a place of checkpoints holds, decoded: manifests, and notes of what was verified.

Guarantees: a manifest is whole and that of its step, or the error says what is wrong with it; which
names mean what is the storage's business (`seatrial.recovery.storage`).

Does not: look at shards; `seatrial.recovery.files` does. Torch-free; anyone may call it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import ManifestError
from .manifest import MANIFEST_BYTES_MAX, Manifest
from .storage import Files, Storage, open_storage

__all__ = ["CheckpointDirectory", "PublishedManifest"]


@dataclass(frozen=True)
class PublishedManifest:
    """A manifest as read from the storage, and the bytes it was read from."""

    manifest: Manifest
    content: bytes


@dataclass(frozen=True)
class CheckpointDirectory:
    """The checkpoints of one run in one storage; the place need not exist."""

    storage: Storage

    @classmethod
    def at(
        cls,
        location: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, object] | None = None,
        single_writer: bool = False,
    ) -> CheckpointDirectory:
        """The checkpoints in a directory or below a URL; see `storage.open_storage`."""
        return cls(open_storage(location, options=storage_options, single_writer=single_writer))

    @property
    def location(self) -> str:
        return self.storage.location

    def read_manifest(self, step: int) -> PublishedManifest:
        """The whole manifest of a published step.

        Raises:
            DamagedCheckpointError: it is missing or unreadable.
            ManifestError: it is not whole, breaks the schema, or belongs to another step.
        """
        content = self.storage.read_manifest(step, MANIFEST_BYTES_MAX + 1)
        manifest = Manifest.from_bytes(content)
        if manifest.step != step:
            path = self.storage.manifest_path(step)
            raise ManifestError(f"{path} is the manifest of step {manifest.step}")
        return PublishedManifest(manifest, content)

    def files(self, manifest: Manifest) -> Files:
        """The files that ``manifest`` names."""
        return self.storage.files(manifest.step, manifest.attempt)

    def verified_attempt(self, step: int) -> str | None:
        """The attempt for which the note on the step vouches, or None."""
        try:
            note = json.loads(self.storage.read_note(step))
        except (OSError, ValueError, RecursionError):
            return None
        attempt = note.get("attempt") if isinstance(note, dict) else None
        return attempt if isinstance(attempt, str) else None

    def mark_verified(self, step: int, attempt: str) -> None:
        """Note that every byte of ``attempt`` was found as it was saved."""
        if self.verified_attempt(step) != attempt:
            self.storage.write_note(step, json.dumps({"attempt": attempt}).encode() + b"\n")
