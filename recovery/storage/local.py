"""Checkpoints in one local or shared POSIX directory.

Guarantees: a step is published exactly if its directory holds ``manifest.json``, which appears
there by `link()`; a step disappears by one rename, made durable before any of its files goes, so
that a crash leaves it whole or gone. What is in quarantine is never deleted.

Does not: follow symlinks in the place of checkpoints, or know of other live runs. Torch-free;
opened by `seatrial.recovery.storage.open_storage`.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import AlreadyPublishedError, CheckpointError
from ..manifest import MANIFEST_BYTES_MAX, Manifest
from ..probe import perform
from ..publish import (
    TEMPORARY_SUFFIX,
    fsync_directory,
    open_directory,
    open_regular,
    probe_publish,
)
from .local_attempt import LocalAttempt
from .local_files import LocalFiles
from .names import (
    ATTEMPT_PREFIX,
    MANIFEST,
    NOTE_BYTES_MAX,
    PROBE_PREFIX,
    QUARANTINE,
    TRASH_PREFIX,
    VERIFIED,
    attempt_name,
    quarantine_note,
    step_name,
    step_of,
)
from .retry import LOCAL, RetryPolicy, retried

__all__ = ["LocalStorage"]


class LocalStorage:
    """The checkpoints in ``root``, which need not exist."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._proven = False
        # Made by `begin`, and fsynced before a manifest is linked; if that fails, by a later save.
        self._new_directories: set[Path] = set()

    @property
    def location(self) -> str:
        return str(self.root)

    @property
    def retry(self) -> RetryPolicy:
        return LOCAL

    def exists(self) -> bool:
        return self.root.is_dir()

    def steps(self) -> list[int]:
        steps = (step_of(name) for name in _names(self.root))
        return sorted(step for step in steps if step is not None and self._step(step).is_dir())

    def published(self) -> list[int]:
        return [step for step in self.steps() if self.is_published(step)]

    def is_published(self, step: int) -> bool:
        path = self.manifest_path(step)
        return perform("storage/stat", lambda _: os.path.lexists(path), file=path)

    def manifest_path(self, step: int) -> str:
        return str(self._step(step) / MANIFEST)

    def read_manifest(self, step: int, bytes_max: int) -> bytes:
        path = self._step(step) / MANIFEST
        return retried(lambda: _read(path, bytes_max), self.retry)

    def read_note(self, step: int) -> bytes:
        return _read(self._step(step) / VERIFIED, NOTE_BYTES_MAX)

    def write_note(self, step: int, content: bytes) -> None:
        # Not fsynced: if it is lost, more is kept than needed.
        temporary = self._step(step) / f".{VERIFIED}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
        perform("storage/write", temporary.write_bytes, content, file=str(temporary))
        _rename(temporary, self._step(step) / VERIFIED)

    def quarantined(self) -> list[str]:
        names = _names(self.root / QUARANTINE)
        return sorted(name for name in names if not name.endswith(".json"))

    def leftovers(self) -> list[str]:
        names = _names(self.root)
        found = [Path(name) for name in names if name.startswith((TRASH_PREFIX, PROBE_PREFIX))]
        for step in self.steps():
            directory = Path(step_name(step))
            if self.is_published(step):
                found += [directory / name for name in self._leftovers_of(step)]
            else:
                found.append(directory)
        return [str(path) for path in sorted(found)]

    def _leftovers_of(self, step: int) -> list[str]:
        names = _names(self._step(step))
        temporaries = [name for name in names if name.endswith(TEMPORARY_SUFFIX)]
        attempts = [name for name in names if name.startswith(ATTEMPT_PREFIX)]
        if len(attempts) < 2:
            return temporaries  # The usual case; manifests can be long and need not be read.
        try:
            content = self.read_manifest(step, MANIFEST_BYTES_MAX + 1)
            keep = Manifest.from_bytes(content).attempt
        except (CheckpointError, OSError):
            return temporaries  # Which attempt it names is not known, so none is a leftover.
        return [*temporaries, *(name for name in attempts if name != keep)]

    def files(self, step: int, attempt: str) -> LocalFiles:
        return LocalFiles(self._step(step) / attempt)

    def prove(self) -> None:
        if not self._proven:
            probe_publish(self.root)
            self._proven = True

    def begin(self, step: int) -> LocalAttempt:
        self._new_directories |= {
            path for path in (self.root, *self.root.parents) if not path.exists()
        }
        self.root.mkdir(parents=True, exist_ok=True)
        self.prove()
        if self.is_published(step):
            raise AlreadyPublishedError(
                f"{self.manifest_path(step)} exists; resume from it, or remove the step's "
                "directory to save it again"
            )
        directory = self._step(step) / attempt_name()
        directory.parent.mkdir(exist_ok=True)
        directory.mkdir()
        return LocalAttempt(directory, step, self._fsync_parents)

    def _fsync_parents(self) -> None:
        fsync_directory(self.root)
        for made in tuple(self._new_directories):
            fsync_directory(made.parent)
            self._new_directories.discard(made)

    def delete(self, leftovers: Sequence[str], steps: Sequence[int]) -> list[str]:
        collected = []
        trash = []
        for name in [*leftovers, *map(step_name, steps)]:
            gone = self._set_aside_for_deletion(self.root / name)
            if gone is not None:
                trash.append(gone)
                collected.append(name)
        if steps:
            fsync_directory(self.root)
        for path in trash:
            perform("storage/delete", lambda _, path=path: _delete(path), file=str(path))  # type: ignore[misc]
        return collected

    def _set_aside_for_deletion(self, path: Path) -> Path | None:
        """Rename ``path`` out of every name that is ever read; None if it is not to be deleted."""
        if path.name.startswith(TRASH_PREFIX) or path.is_symlink() or not path.is_dir():
            return path
        trash = self.root / f"{TRASH_PREFIX}{secrets.token_hex(8)}"
        was_published = (path / MANIFEST).exists()
        try:
            _rename(path, trash)
        except FileNotFoundError:
            return None
        if not was_published and (trash / MANIFEST).exists():
            # Someone published between the look and the rename: that checkpoint is whole.
            with suppress(OSError):
                trash.rename(path)
            return None
        return trash

    def quarantine(self, step: int, reason: str) -> str:
        quarantine = self.root / QUARANTINE
        quarantine.mkdir(exist_ok=True)
        source = self._step(step)
        number = 1
        while os.path.lexists(quarantine / f"{source.name}-{number}"):
            number += 1
        name = f"{source.name}-{number}"
        (quarantine / f"{name}.json").write_bytes(quarantine_note(step, reason))
        _rename(source, quarantine / name)
        fsync_directory(quarantine)
        fsync_directory(self.root)
        return name

    def _step(self, step: int) -> Path:
        return self.root / step_name(step)


def _names(directory: Path) -> list[str]:
    try:
        return perform("storage/list", lambda _: os.listdir(directory), file=str(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _rename(path: Path, target: Path) -> None:
    perform("storage/rename", lambda _: path.rename(target), file=str(target))


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _read(path: Path, bytes_max: int) -> bytes:
    return perform("storage/read", lambda _: _content(path, bytes_max), file=str(path))


def _content(path: Path, bytes_max: int) -> bytes:
    with open_directory(path.parent) as directory:
        file = open_regular(directory, path.name)
    with open(file, "rb") as stream:
        return stream.read(bytes_max)
