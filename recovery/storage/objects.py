"""Checkpoints in an object store: no directories, no renames, no fsync.

An object store has atomic whole objects and, if it is to be used here, one that can be created
exclusively (`Objects.create`). From these two everything is made; `generations` says how a step
that was deleted or set aside stays closed to attempts that come late.

Guarantees: those of `storage.protocol`. A step is published exactly if its newest generation has a
manifest; it disappears when that manifest is replaced by a tombstone, which is one atomic write,
and only then its files are deleted. Files of what is in quarantine stay where they are, and are
never deleted. Unfinished uploads are collected like files, and only below this store's prefix.

Does not: remove tombstones (26 bytes for each deleted step), or delete old versions in a bucket
that keeps versions. Torch-free; opened by `seatrial.recovery.storage.open_storage`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import AlreadyPublishedError, CheckpointError
from ..manifest import MANIFEST_BYTES_MAX, Manifest
from .damage import named
from .generations import COLLECTED, QUARANTINED, StepView, manifest_name, tombstone_of
from .names import (
    BEGUN,
    MANIFEST,
    NOTE_BYTES_MAX,
    PROBE_PREFIX,
    QUARANTINE,
    VERIFIED,
    attempt_name,
    quarantine_note,
    step_name,
    step_of,
)
from .object_attempt import ObjectAttempt, ObjectFiles
from .protocol import Contents, Sink
from .retry import REMOTE, RetryPolicy

__all__ = ["ObjectStorage", "Objects"]


class Objects(Protocol):
    """What is asked of an object store; names are relative to the URL.

    Every method tries again after transient errors, and raises `OSError`.
    """

    @property
    def url(self) -> str: ...

    @property
    def threads(self) -> int:
        """How many requests at a time a reader may make."""

    def prove(self) -> None:
        """Raise `StorageUnsupportedError` unless `create` is exclusive."""

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """The objects whose names begin so, with their sizes in bytes."""

    def get(self, name: str, bytes_max: int) -> bytes:
        """At most ``bytes_max`` bytes; raises `FileNotFoundError`."""

    def read_into(self, name: str, offset: int, target: memoryview, size_bytes: int) -> None:
        """Fill ``target``.

        Raises:
            DamagedCheckpointError: the object has not ``size_bytes``.
        """

    def put(self, name: str, data: bytes) -> None:
        """Write the object at once, in place of what was there."""

    def create(self, name: str, data: bytes) -> bool:
        """Write the object unless there is one; whether it is now ours, by its content.

        True also where an earlier try took effect and its reply was lost.
        """

    def upload(self, name: str, size_bytes: int) -> AbortableSink:
        """Begin an object of known size, written in the order of its bytes."""

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; those that are missing count as deleted."""

    def uploads(self) -> list[tuple[str, str]]:
        """Name and id of every upload that was begun and neither completed nor aborted."""

    def abort(self, name: str, upload: str) -> None:
        """Delete what was uploaded so far; an upload that is over counts as aborted."""


class AbortableSink(Sink, Protocol):
    def abort(self) -> None:
        """Give up, and delete what was written so far, as far as possible."""


@dataclass
class _Leftover:
    """Objects and uploads that no manifest names. ``step``: where to close the open generation."""

    names: list[str] = field(default_factory=list)
    uploads: list[tuple[str, str]] = field(default_factory=list)
    step: int | None = None


class ObjectStorage:
    """The checkpoints below the URL of ``objects``."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._proven = False
        self._tombstones: dict[str, bytes] = {}  # they never change

    @property
    def objects(self) -> Objects:
        """The objects themselves, for tools; the store's protocol does not use it."""
        return self._objects

    @property
    def location(self) -> str:
        return self._objects.url

    @property
    def retry(self) -> RetryPolicy:
        return REMOTE

    def exists(self) -> bool:
        self._objects.sizes(QUARANTINE)  # raises if the bucket cannot be read
        return True

    def steps(self) -> list[int]:
        return sorted(step for step, view in self._views().items() if view.has_files)

    def published(self) -> list[int]:
        return sorted(step for step, view in self._views().items() if view.live is not None)

    def is_published(self, step: int) -> bool:
        return self._view(step).live is not None

    def manifest_path(self, step: int) -> str:
        return f"{self.location}/{self._manifest(step)}"

    def read_manifest(self, step: int, bytes_max: int) -> bytes:
        name = self._manifest(step)
        with named(f"{self.location}/{name}"):
            return self._objects.get(name, bytes_max)

    def read_note(self, step: int) -> bytes:
        return self._objects.get(f"{step_name(step)}/{VERIFIED}", NOTE_BYTES_MAX)

    def write_note(self, step: int, content: bytes) -> None:
        self._objects.put(f"{step_name(step)}/{VERIFIED}", content)

    def quarantined(self) -> list[str]:
        names = self._objects.sizes(f"{QUARANTINE}/")
        found = {name.split("/")[1] for name in names if name.endswith(f"/{MANIFEST}")}
        return sorted(found)

    def leftovers(self) -> list[str]:
        return list(self.contents().leftovers)

    def contents(self) -> Contents:
        views = self._views()
        published = sorted(step for step, view in views.items() if view.live is not None)
        noted = frozenset(step for step in published if views[step].noted)
        leftovers = sorted(self._leftovers(views))
        return Contents(published=published, noted=noted, leftovers=leftovers)

    def files(self, step: int, attempt: str) -> ObjectFiles:
        return ObjectFiles(self._objects, f"{step_name(step)}/{attempt}")

    def prove(self) -> None:
        """Raise `StorageUnsupportedError` unless the storage can publish exactly once."""
        if not self._proven:
            self._objects.prove()
            self._proven = True

    def begin(self, step: int) -> ObjectAttempt:
        self.prove()
        view = self._view(step)
        if view.live is not None:
            raise AlreadyPublishedError(
                f"{self.manifest_path(step)} exists; resume from it, or save to another URL"
            )
        files = self.files(step, attempt_name(view.open_generation))
        # Whoever collects from here on sees that this generation has an attempt, and closes it.
        self._objects.put(f"{files.prefix}/{BEGUN}", b"{}\n")
        return ObjectAttempt(self._objects, files, step, view.open_generation)

    def delete(self, leftovers: Sequence[str], steps: Sequence[int]) -> list[str]:
        if not leftovers and not steps:
            return []
        views = self._views()
        found = self._leftovers(views) if leftovers else {}
        names: list[str] = []
        collected = []
        closed: dict[int, bool] = {}
        for name in leftovers:
            leftover = found.get(name)
            if leftover is None:
                continue
            step = leftover.step
            if step is not None and step not in closed:
                # From here on no attempt that exists by now can publish; if one just has, its
                # checkpoint is whole.
                manifest = manifest_name(step, views[step].open_generation)
                closed[step] = self._objects.create(manifest, COLLECTED)
                if closed[step]:
                    self._tombstones[manifest] = COLLECTED
            if step is not None and not closed[step]:
                continue
            for upload in leftover.uploads:
                self._objects.abort(*upload)
            names += leftover.names
            collected.append(name)
        for step in steps:
            view = views.get(step)
            if view is not None and view.live is not None:
                manifest = manifest_name(step, view.live)
                self._objects.put(manifest, COLLECTED)
                self._tombstones[manifest] = COLLECTED  # so that it need not be read
                names += view.deletable(view.live)
                collected.append(step_name(step))
        self._objects.delete(names)
        return collected

    def quarantine(self, step: int, reason: str) -> str:
        view = self._view(step)
        if view.live is None:
            raise CheckpointError(f"step {step} is not published in {self.location}")
        manifest = manifest_name(step, view.live)
        taken = self._objects.sizes(f"{QUARANTINE}/{step_name(step)}-")
        number = 1
        while any(name.startswith(_aside(step, number)) for name in taken):
            number += 1
        aside = _aside(step, number).rstrip(".")
        self._objects.put(f"{aside}.json", quarantine_note(step, reason))
        content = self._objects.get(manifest, MANIFEST_BYTES_MAX + 1)
        self._objects.put(f"{aside}/{MANIFEST}", content)
        self._objects.put(manifest, QUARANTINED)
        self._objects.delete([f"{step_name(step)}/{VERIFIED}"])
        return aside.removeprefix(f"{QUARANTINE}/")

    # How steps stand

    def _manifest(self, step: int) -> str:
        live = self._view(step, f"{step_name(step)}/manifest").live
        return manifest_name(step, live or 0)

    def _view(self, step: int, prefix: str | None = None) -> StepView:
        sizes = self._objects.sizes(prefix or f"{step_name(step)}/")
        return self._seen(step, sizes)

    def _views(self) -> dict[int, StepView]:
        by_step: dict[int, dict[str, int]] = {}
        for name, size_bytes in self._objects.sizes("step-").items():
            step = step_of(name.partition("/")[0])
            if step is not None:
                by_step.setdefault(step, {})[name] = size_bytes
        return {step: self._seen(step, sizes) for step, sizes in by_step.items()}

    def _seen(self, step: int, sizes: dict[str, int]) -> StepView:
        return StepView.of(step, sizes, self._tombstone)

    def _tombstone(self, name: str, size_bytes: int) -> bytes | None:
        known = self._tombstones.get(name)
        if known is not None and len(known) == size_bytes:  # else it was not written after all
            return known
        found = tombstone_of(size_bytes, lambda bytes_max: self._objects.get(name, bytes_max))
        if found is not None:
            self._tombstones[name] = found
        return found

    def _leftovers(self, views: dict[int, StepView]) -> dict[str, _Leftover]:
        found = {
            name: _Leftover(names=[name])
            for name in self._objects.sizes(PROBE_PREFIX)
            if "/" not in name
        }
        for step, view in views.items():
            if view.live is None:
                names = view.deletable(view.open_generation)
                if names:
                    found[step_name(step)] = _Leftover(names=names, step=step)
            else:
                found |= dict(self._losers(view))
        found |= dict(self._unfinished(views))
        return found

    def _losers(self, view: StepView) -> Iterator[tuple[str, _Leftover]]:
        """The attempts of a published step that its manifest does not name."""
        assert view.live is not None
        attempts = view.deletable_attempts(view.live)
        if len(attempts) < 2:
            return  # The usual case; manifests can be long and need not be read.
        try:
            content = self.read_manifest(view.step, MANIFEST_BYTES_MAX + 1)
            keep = Manifest.from_bytes(content).attempt
        except (CheckpointError, OSError):
            return  # Which attempt it names is not known, so none is a leftover.
        for attempt, names in attempts.items():
            if attempt != keep:
                yield f"{step_name(view.step)}/{attempt}", _Leftover(names=names)

    def _unfinished(self, views: dict[int, StepView]) -> Iterable[tuple[str, _Leftover]]:
        for name, upload in self._objects.uploads():
            step = step_of(name.partition("/")[0])
            if step is None:
                continue
            view = views.setdefault(step, StepView(step))
            generation = view.generation_of(name)
            if generation is None or generation in view.kept:
                continue
            leftover = _Leftover(uploads=[(name, upload)])
            if view.live is None and generation >= view.open_generation:
                leftover.step = step
            yield f"{name} (unfinished upload {upload[:16]})", leftover


def _aside(step: int, number: int) -> str:
    """The beginning of what a checkpoint in quarantine has for names, with a dot."""
    return f"{QUARANTINE}/{step_name(step)}-{number}."
