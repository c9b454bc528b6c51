"""Storage that lies at rest: the newest published checkpoint loses or changes bytes.

The damage is done by the rank whose event triggered it, to its own file, so it happens at an exact
point of the run. It speaks to the checkpoint's documented layout, not to the store's code, which
must find out by itself. Torch-free.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path

from seatrial.recovery.manifest import Manifest

from .errors import ChaosError
from .fault import Fault


@dataclass(frozen=True)
class Damage:
    """What was done: ``change`` in words, ``file`` relative to the store."""

    step: int
    file: str
    change: str


def damage_newest(store: Path, fault: Fault, rank: int, *, seed: int) -> Damage:
    """Apply ``tear``, ``flip`` or ``remove`` to ``rank``'s file of the newest checkpoint.

    Raises:
        ChaosError: nothing is published yet, or the rank wrote no bytes that could be damaged.
    """
    published = sorted(store.glob("step-*/manifest.json"))
    if not published:
        raise ChaosError(f"'{fault}' found no published checkpoint to damage")
    manifest = Manifest.from_bytes(published[-1].read_bytes())
    path, used = _target(published[-1], manifest, fault.part, rank)
    if fault.action == "remove":
        path.unlink()
        change = "removed"
    elif fault.action == "tear":
        size_bytes = path.stat().st_size // 2
        os.truncate(path, size_bytes)
        change = f"cut to {size_bytes} bytes"
    else:
        change = _flip_bit(path, used, random.Random(f"{seed}/{rank}"))
    return Damage(manifest.step, str(path.relative_to(store)), change)


def _target(manifest_file: Path, manifest: Manifest, part: str, rank: int) -> tuple[Path, range]:
    """The file and the range of its bytes that a restore uses."""
    if part == "manifest":
        return manifest_file, range(manifest_file.stat().st_size)
    directory = manifest_file.parent / manifest.attempt
    if part == "objects":
        path = directory / manifest.objects[rank].name
        return path, range(path.stat().st_size)
    name = manifest.shards[rank].name
    chunks = [
        chunk
        for tensor in manifest.tensors
        for chunk in tensor.chunks
        if chunk.file == name and chunk.length
    ]
    if not chunks:
        raise ChaosError(f"rank {rank} stored no tensor bytes in step {manifest.step}")
    start = min(chunk.offset for chunk in chunks)
    return directory / name, range(start, max(chunk.offset + chunk.length for chunk in chunks))


def _flip_bit(path: Path, used: range, choice: random.Random) -> str:
    position, bit = choice.choice(used), choice.randrange(8)
    with path.open("r+b") as file:
        file.seek(position)
        value = file.read(1)[0]
        file.seek(position)
        file.write(bytes([value ^ (1 << bit)]))
    return f"bit {bit} of byte {position} flipped"
