"""Checkpoints in one local or shared POSIX directory.

Guarantees: a step is published exactly if its directory holds ``manifest.json``, which appears
there by `link()`; a step disappears by one rename, made durable before any of its files goes, so
that a crash leaves it whole or gone. What is in quarantine is never deleted.

Does not: follow symlinks inside of the directory (which may be one itself), or know of other live
runs. Torch-free; opened by `seatrial.recovery.storage.open_storage`.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
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
from .damage import named
from .local_attempt import LocalAttempt
from .local_files import LocalFiles
from .names import (
    ASIDE_PREFIX,
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
from .protocol import Contents
from .retry import LOCAL, RetryPolicy, retried

__all__ = ["LocalStorage"]

# Of a token that `secrets` made: names that others give are not ours to delete.
_ASIDE = re.compile(rf"{re.escape(ASIDE_PREFIX)}(step-[0-9]+)-[0-9a-f]+")
_SCRATCH = re.compile(
    rf"{re.escape(TRASH_PREFIX)}[0-9a-f]+|{re.escape(PROBE_PREFIX)}[0-9a-f]+{re.escape(TEMPORARY_SUFFIX)}"
    rf"|{_ASIDE.pattern}"
)
_TEMPORARY = re.compile(
    rf"\.(?:{re.escape(MANIFEST)}|{re.escape(VERIFIED)})\.[0-9a-f]+{re.escape(TEMPORARY_SUFFIX)}"
)


class LocalStorage:
    """The checkpoints in ``root``, which need not exist."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._proven = False
        # Perhaps new; made durable before a manifest is linked, or by a later save if that fails.
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
        self._require_no_file()
        return self._steps_among(_names(self.root))

    def _steps_among(self, names: Sequence[str]) -> list[int]:
        steps = (step_of(name) for name in names)
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
        with named(str(path)):
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
        return list(self.contents().leftovers)

    def contents(self) -> Contents:
        self._require_no_file()
        names = _names(self.root)
        found = [Path(name) for name in names if _SCRATCH.fullmatch(name)]
        published, noted = [], set()
        for step in self._steps_among(names):
            directory = Path(step_name(step))
            inside = _names(self._step(step))
            if not self.is_published(step):
                # What somebody else keeps under such a name is not ours to delete.
                found += [directory] if all(map(_is_own, inside)) else []
                continue
            published.append(step)
            if VERIFIED in inside:
                noted.add(step)
            found += [directory / name for name in self._leftovers_of(step, inside)]
        leftovers = [str(path) for path in sorted(found)]
        return Contents(published=published, noted=frozenset(noted), leftovers=leftovers)

    def _leftovers_of(self, step: int, names: Sequence[str]) -> list[str]:
        temporaries = [name for name in names if _TEMPORARY.fullmatch(name)]
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

    def _require_no_file(self) -> None:
        """Raise `CheckpointError` if something else than a directory is in the place of one.

        To take that for an empty place would let a job start anew.
        """
        if not self.root.is_dir() and os.path.lexists(self.root):
            is_link = self.root.is_symlink()
            what = "a symbolic link to no directory" if is_link else "no directory"
            raise CheckpointError(
                f"{self.root} is {what}, so no checkpoints can be there; name a directory"
                + (", or mount what the link leads to" if is_link else "")
            )

    def prove(self) -> None:
        if not self._proven:
            probe_publish(self._place)
            self._proven = True

    def begin(self, step: int) -> LocalAttempt:
        self._require_no_file()
        self.root.mkdir(parents=True, exist_ok=True)
        if not self._proven and not self.published():
            self._new_directories = set(self._perhaps_new())
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

    @property
    def _place(self) -> Path:
        """Where the directory is, if ``root`` is a symbolic link to it."""
        return self.root.resolve()

    def _perhaps_new(self) -> Iterator[Path]:
        """The directory, and those above it up to where its file system is mounted.

        Whoever made them may have been killed before they were durable.
        """
        place = self._place
        device = place.stat().st_dev
        for path in (place, *place.parents):
            if path.parent == path or path.parent.stat().st_dev != device:
                return
            yield path

    def _fsync_parents(self) -> None:
        fsync_directory(self._place)
        for made in tuple(self._new_directories):
            # One that may not be read was there before; nobody makes such a one by accident.
            with suppress(PermissionError):
                fsync_directory(made.parent)
            self._new_directories.discard(made)

    def delete(self, leftovers: Sequence[str], steps: Sequence[int]) -> list[str]:
        collected = []
        trash = []
        unneeded = [(name, False) for name in leftovers] + [(step_name(s), True) for s in steps]
        for name, published in unneeded:
            gone = self._set_aside_for_deletion(self.root / name, published=published)
            if gone is not None:
                trash.append(gone)
                collected.append(name)
        if steps:
            fsync_directory(self._place)
        for path in trash:
            perform("storage/delete", lambda _, path=path: _delete(path), file=str(path))  # type: ignore[misc]
        return collected

    def _set_aside_for_deletion(self, path: Path, *, published: bool) -> Path | None:
        """Rename ``path`` out of every name that is ever read; None if it is not to be deleted.

        A step that is not to go although it is ``published`` is one that was published since it was
        listed as a leftover: that checkpoint is whole, and may have been acknowledged. It is put
        back, by the next collection if this one is killed before it can.
        """
        if path.name.startswith(TRASH_PREFIX) or path.is_symlink() or not path.is_dir():
            return path
        if match := _ASIDE.fullmatch(path.name):
            return self._unless_published(path, self.root / match[1])
        if not published and os.path.lexists(path / MANIFEST):
            return None
        is_step = not published and step_of(path.name) is not None
        prefix = f"{ASIDE_PREFIX}{path.name}-" if is_step else TRASH_PREFIX
        trash = self.root / f"{prefix}{secrets.token_hex(8)}"
        try:
            _rename(path, trash)
        except FileNotFoundError:
            return None
        return self._unless_published(trash, path) if is_step else trash

    def _unless_published(self, aside: Path, step: Path) -> Path | None:
        """``aside``, unless it was published while it was on its way here from ``step``."""
        if not os.path.lexists(aside / MANIFEST):
            return aside
        if os.path.lexists(step / MANIFEST):
            return aside  # saved once more since
        with suppress(OSError):  # another attempt is saving it: that one decides
            _rename(aside, step)
            fsync_directory(self._place)
        return None

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
        fsync_directory(self._place)
        return name

    def _step(self, step: int) -> Path:
        return self.root / step_name(step)


def _is_own(name: str) -> bool:
    """Whether it is a name that a store gives in the directory of a step."""
    is_temporary = _TEMPORARY.fullmatch(name) is not None
    return name.startswith(ATTEMPT_PREFIX) or name in (MANIFEST, VERIFIED) or is_temporary


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
