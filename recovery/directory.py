"""The names inside a checkpoint directory, and what they mean.

    step-00000010/manifest.json                           the commit
    step-00000010/attempt-<id>/rank-00000.safetensors     tensors that rank 0 stored
    step-00000010/attempt-<id>/rank-00000.json            plain data of rank 0
    step-00000010/verified.json                           a restore, or `verify`, found it whole
    quarantine/step-00000010-<n>/, .../step-…-<n>.json     damaged, and why; never resumed from
    .trash-<id>/                                          about to be deleted

Guarantees: a step is published exactly if its directory holds ``manifest.json``; everything else
that is not named by a published manifest is a leftover. Does not write. Torch-free; anyone may call
it.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointError, ManifestError
from .files import retried
from .manifest import MANIFEST_BYTES_MAX, Manifest
from .publish import TEMPORARY_SUFFIX, open_directory, open_regular

__all__ = ["CheckpointDirectory", "PublishedManifest"]

MANIFEST = "manifest.json"
VERIFIED = "verified.json"
QUARANTINE = "quarantine"
TRASH_PREFIX = ".trash-"
ATTEMPT_PREFIX = "attempt-"

_NOTE_BYTES_MAX = 4096
_STEP = re.compile(r"step-([0-9]{8,})")


@dataclass(frozen=True)
class PublishedManifest:
    """A manifest as read from its step directory, and the bytes it was read from."""

    manifest: Manifest
    content: bytes


@dataclass(frozen=True)
class CheckpointDirectory:
    """One directory of checkpoints; it need not exist."""

    root: Path

    def step(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def attempt(self, step: int, attempt: str) -> Path:
        return self.step(step) / attempt

    def manifest(self, step: int) -> Path:
        return self.step(step) / MANIFEST

    @property
    def quarantine(self) -> Path:
        return self.root / QUARANTINE

    def steps(self) -> list[int]:
        """All steps that have a directory, published or not, lowest first."""
        matches = (_STEP.fullmatch(name) for name in _names(self.root))
        # A directory under another spelling of the number (more zeros) is none of ours.
        steps = {int(match[1]) for match in matches if match}
        return sorted(step for step in steps if self.step(step).is_dir())

    def is_published(self, step: int) -> bool:
        return os.path.lexists(self.manifest(step))

    def published(self) -> list[int]:
        """The published steps, lowest first; their manifests may be damaged."""
        return [step for step in self.steps() if self.is_published(step)]

    def read_manifest(self, step: int) -> PublishedManifest:
        """The whole manifest of a published step.

        Raises:
            DamagedCheckpointError: it is missing or unreadable.
            ManifestError: it is not whole, breaks the schema, or belongs to another step.
        """
        path = self.manifest(step)
        content = retried(lambda: _read(path, MANIFEST_BYTES_MAX + 1), path)
        manifest = Manifest.from_bytes(content)
        if manifest.step != step:
            raise ManifestError(f"{path} is the manifest of step {manifest.step}")
        return PublishedManifest(manifest, content)

    def verified_attempt(self, step: int) -> str | None:
        """The attempt that `verified.json` of the step vouches for, or None."""
        try:
            note = json.loads(_read(self.step(step) / VERIFIED, _NOTE_BYTES_MAX))
        except (OSError, ValueError, RecursionError):
            return None
        attempt = note.get("attempt") if isinstance(note, dict) else None
        return attempt if isinstance(attempt, str) else None

    def quarantined(self) -> list[str]:
        """The names of the damaged checkpoints that were set aside."""
        return sorted(name for name in _names(self.quarantine) if not name.endswith(".json"))

    def leftovers(self) -> list[Path]:
        """Everything that no published manifest names: what dead attempts left behind."""
        names = _names(self.root)
        found = [self.root / n for n in names if n.startswith((TRASH_PREFIX, ".probe."))]
        for step in self.steps():
            directory = self.step(step)
            if self.is_published(step):
                found += [directory / name for name in self._leftovers_of(step)]
            else:
                found.append(directory)
        return sorted(found)

    def _leftovers_of(self, step: int) -> list[str]:
        names = _names(self.step(step))
        temporaries = [name for name in names if name.endswith(TEMPORARY_SUFFIX)]
        attempts = [name for name in names if name.startswith(ATTEMPT_PREFIX)]
        if len(attempts) < 2:
            return temporaries  # The usual case; manifests can be long and need not be read.
        try:
            keep = self.read_manifest(step).manifest.attempt
        except (CheckpointError, OSError):
            return temporaries  # Which attempt it names is not known, so none is a leftover.
        return [*temporaries, *(name for name in attempts if name != keep)]


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read(path: Path, bytes_max: int) -> bytes:
    with open_directory(path.parent) as directory:
        file = open_regular(directory, path.name)
    with open(file, "rb") as stream:
        return stream.read(bytes_max)
