"""Storage that lies at rest: the newest published checkpoint loses or changes bytes.

The damage is done by the rank whose event triggered it, to its own file, so it happens at an exact
point of the run. It speaks to the checkpoint's documented layout, not to the store's code, which
must find out by itself; below a URL it replaces or deletes the object. Torch-free.
"""

from __future__ import annotations

import os
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from seatrial.recovery.manifest import MANIFEST_BYTES_MAX, Manifest
from seatrial.recovery.publish import fsync_directory
from seatrial.recovery.storage.generations import tombstone_of
from seatrial.recovery.storage.objects import Objects

from .errors import ChaosError
from .fault import Fault
from .stores import objects_at

_MANIFEST = re.compile(r"step-[0-9]{8,}/manifest(-[0-9]+)?\.json")


@dataclass(frozen=True)
class Damage:
    """What was done: ``change`` in words, ``file`` relative to the store."""

    step: int
    file: str
    change: str


def damage_newest(store: str, fault: Fault, rank: int, *, seed: int) -> Damage:
    """Apply an action of `DAMAGE` to ``rank``'s file of the newest checkpoint.

    Raises:
        ChaosError: nothing is published yet, the rank wrote no bytes that could be damaged, or
            there is no earlier checkpoint to roll back to.
    """
    objects = objects_at(store)
    files: _Files = _Directory(Path(store)) if objects is None else _Objects(objects)
    published = sorted(files.manifests())
    if not published:
        raise ChaosError(f"'{fault}' found no published checkpoint to damage")
    manifest = Manifest.from_bytes(files.read(published[-1]))
    name, used = _target(files, published[-1], manifest, fault.part, rank)
    if fault.action == "remove":
        files.remove(name)
        change = "removed"
    elif fault.action == "tear":
        size_bytes = files.size(name) // 2
        files.truncate(name, size_bytes)
        change = f"cut to {size_bytes} bytes"
    elif fault.action == "swap":
        peer = (rank + 1) % manifest.world_size
        other, _ = _target(files, published[-1], manifest, fault.part, peer)
        mine, theirs = files.content(name), files.content(other)
        files.write(name, theirs)
        files.write(other, mine)
        change = f"swapped with {other}"
    elif fault.action == "rollback":
        if len(published) < 2:
            raise ChaosError(f"'{fault}' found no earlier checkpoint to roll back to")
        earlier = Manifest.from_bytes(files.read(published[-2]))
        source, _ = _target(files, published[-2], earlier, fault.part, rank)
        files.write(name, files.content(source))
        change = f"replaced by {source}"
    else:
        choice = random.Random(f"{seed}/{rank}")
        position, bit = choice.choice(used), choice.randrange(8)
        files.flip(name, position, 1 << bit)
        change = f"bit {bit} of byte {position} flipped"
    return Damage(manifest.step, name, change)


def _target(
    files: _Files, manifest_name: str, manifest: Manifest, part: str, rank: int
) -> tuple[str, range]:
    """The file and the range of its bytes that a restore uses."""
    if part == "manifest":
        return manifest_name, range(files.size(manifest_name))
    directory = f"{manifest_name.partition('/')[0]}/{manifest.attempt}"
    if part == "objects":
        name = f"{directory}/{manifest.objects[rank].name}"
        return name, range(files.size(name))
    shard = manifest.shards[rank].name
    chunks = [
        chunk
        for tensor in manifest.tensors
        for chunk in tensor.chunks
        if chunk.file == shard and chunk.length
    ]
    if not chunks:
        raise ChaosError(f"rank {rank} stored no tensor bytes in step {manifest.step}")
    start = min(chunk.offset for chunk in chunks)
    end = max(chunk.offset + chunk.length for chunk in chunks)
    return f"{directory}/{shard}", range(start, end)


class _Files(Protocol):
    """The files of a store, by names relative to it."""

    def manifests(self) -> list[str]: ...
    def read(self, name: str) -> bytes: ...
    def content(self, name: str) -> bytes: ...
    def write(self, name: str, content: bytes) -> None: ...
    def size(self, name: str) -> int: ...
    def remove(self, name: str) -> None: ...
    def truncate(self, name: str, size_bytes: int) -> None: ...
    def flip(self, name: str, position: int, bits: int) -> None: ...


@dataclass(frozen=True)
class _Directory:
    root: Path

    def manifests(self) -> list[str]:
        return [str(path.relative_to(self.root)) for path in self.root.glob("step-*/manifest.json")]

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def content(self, name: str) -> bytes:
        return self.read(name)

    def write(self, name: str, content: bytes) -> None:
        (self.root / name).write_bytes(content)
        self._settle(name)

    def size(self, name: str) -> int:
        return (self.root / name).stat().st_size

    def remove(self, name: str) -> None:
        (self.root / name).unlink()
        fsync_directory((self.root / name).parent)

    def truncate(self, name: str, size_bytes: int) -> None:
        os.truncate(self.root / name, size_bytes)
        self._settle(name)

    def flip(self, name: str, position: int, bits: int) -> None:
        with (self.root / name).open("r+b") as file:
            file.seek(position)
            value = file.read(1)[0]
            file.seek(position)
            file.write(bytes([value ^ bits]))
        self._settle(name)

    def _settle(self, name: str) -> None:
        """Damage at rest is not undone by a power loss."""
        with (self.root / name).open("rb") as file:
            os.fsync(file.fileno())


@dataclass(frozen=True)
class _Objects:
    objects: Objects

    def manifests(self) -> list[str]:
        sizes = self.objects.sizes("step-")
        return [
            name
            for name, size_bytes in sizes.items()
            if _MANIFEST.fullmatch(name)
            and tombstone_of(size_bytes, lambda most, name=name: self.objects.get(name, most))  # type: ignore[misc]
            is None
        ]

    def read(self, name: str) -> bytes:
        return self.objects.get(name, MANIFEST_BYTES_MAX)

    def content(self, name: str) -> bytes:
        return self.objects.get(name, self.size(name))

    def write(self, name: str, content: bytes) -> None:
        self.objects.put(name, content)

    def size(self, name: str) -> int:
        return self.objects.sizes(name)[name]

    def remove(self, name: str) -> None:
        self.objects.delete([name])

    def truncate(self, name: str, size_bytes: int) -> None:
        self.objects.put(name, self.objects.get(name, size_bytes))

    def flip(self, name: str, position: int, bits: int) -> None:
        content = bytearray(self.content(name))
        content[position] ^= bits
        self.objects.put(name, bytes(content))
