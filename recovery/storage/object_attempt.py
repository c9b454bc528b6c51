"""One attempt to save a step in an object store, and its files.

Guarantees: a file is there, whole, when its upload was completed, or not at all; the manifest is
created exclusively, and only after the store itself has listed every file with the size that it
was reported with, so that ranks that see different stores publish nothing.

Does not: fsync. An answer of the store is its word that what it acknowledged is durable. Hence the
events ``…/fsync``, ``checkpoint/manifest/write`` and ``…/directory`` do not exist here, and
``checkpoint/manifest/link`` is the creation of the manifest. Torch-free; made by `storage.objects`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import AlreadyPublishedError, SaveError
from ..probe import around
from .generations import COLLECTED, QUARANTINED, manifest_name
from .local_attempt import collected
from .protocol import Sink
from .retry import REMOTE, RetryPolicy

if TYPE_CHECKING:
    from .objects import Objects

__all__ = ["ObjectAttempt", "ObjectFiles"]

READ_BYTES = 16 << 20
"""One request asks for so much at most; it is that of a chunk."""


@dataclass(frozen=True)
class ObjectFiles:
    """The objects below ``prefix``."""

    objects: Objects
    prefix: str

    @property
    def retry(self) -> RetryPolicy:
        return REMOTE

    @property
    def fsyncs(self) -> bool:
        return False

    def path(self, name: str = "") -> str:
        return f"{self.objects.url}/{self.prefix}{f'/{name}' if name else ''}"

    @contextmanager
    def create(self, name: str, size_bytes: int) -> Iterator[Sink]:
        sink = self.objects.upload(f"{self.prefix}/{name}", size_bytes)
        try:
            yield sink
        except BaseException:
            sink.abort()
            raise

    @contextmanager
    def open(self, name: str, size_bytes: int) -> Iterator[ObjectSource]:
        yield ObjectSource(self.objects, f"{self.prefix}/{name}", size_bytes)

    def fsync(self) -> None:
        pass


@dataclass(frozen=True)
class ObjectSource:
    """An object that is being read, by ranges."""

    objects: Objects
    name: str
    size_bytes: int

    @property
    def piece_bytes(self) -> int:
        return READ_BYTES

    @property
    def threads(self) -> int | None:
        return self.objects.threads

    @property
    def gather_bytes(self) -> int:
        return READ_BYTES

    def read_into(self, target: memoryview, offset: int) -> None:
        self.objects.read_into(self.name, offset, target, self.size_bytes)


@dataclass(frozen=True)
class ObjectAttempt:
    """An attempt of ``generation``; nothing was written so far."""

    objects: Objects
    files: ObjectFiles
    step: int
    generation: int

    @property
    def name(self) -> str:
        return self.files.prefix.rpartition("/")[2]

    def fsync(self) -> None:
        pass

    def publish(self, content: bytes, sizes: Mapping[str, int]) -> None:
        prefix = f"{self.files.prefix}/"
        found = {
            name.removeprefix(prefix): size_bytes
            for name, size_bytes in self.objects.sizes(prefix).items()
        }
        if not found:
            raise collected(self.files.path())
        for name, size_bytes in sizes.items():
            if found.get(name) != size_bytes:
                there = f"has {found[name]} bytes" if name in found else "is not there"
                raise SaveError(
                    f"{self.files.path(name)} {there} where {size_bytes} bytes were written, as "
                    "the coordinator sees it; do all ranks write to the same storage?"
                )
        manifest = manifest_name(self.step, self.generation)
        path = f"{self.objects.url}/{manifest}"
        with around("checkpoint/manifest/link", step=self.step, file=path):
            ours = self.objects.create(manifest, content)
        if ours:
            return
        there_now = self.objects.get(manifest, len(content) + 1)
        if there_now in (COLLECTED, QUARANTINED):
            raise collected(self.files.path())
        raise AlreadyPublishedError(
            f"{path} was published before with other content; this attempt lost the race and its "
            "files are leftovers. Resume from the published checkpoint, or save to another URL"
        )

    def abandon(self) -> None:
        with suppress(OSError):
            self.objects.delete(list(self.objects.sizes(f"{self.files.prefix}/")))

    def close(self) -> None:
        pass
