"""Saves whose crash states are asked for: small ones that can be broken."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from seatrial.chaos.crashes.operations import Operation, Recording
from seatrial.chaos.crashes.recorder import Messages, record


def without(recording: Recording, is_left_out: Callable[[Operation], bool]) -> Recording:
    """The same save by a program that lacks some operations, such as an fsync."""

    def heard(operation: Operation) -> Operation:
        if operation.heard is None:
            return operation
        sender, count = operation.heard
        kept = [o for o in recording.ranks[sender][:count] if not is_left_out(o)]
        return replace(operation, heard=(sender, len(kept)))

    ranks = [[heard(o) for o in ops if not is_left_out(o)] for ops in recording.ranks]
    return Recording(ranks, recording.before, recording.nodes)


def record_pointer(
    root: Path, *, in_place: bool = False, early: bool = False, deletes_first: bool = False
) -> Recording:
    """Two ranks, and a file ``latest`` that names a directory of shards with digests beside them.

    It is right unless told otherwise: ``in_place`` writes the shards over the old ones, ``early``
    moves ``latest`` before the shards are durable, ``deletes_first`` deletes the old checkpoint
    before ``latest`` is moved.
    """
    root.mkdir()
    for step in (1,):
        (root / str(step)).mkdir()
        for rank in range(2):
            (root / str(step) / f"{rank}.bin").write_bytes(_shard(step, rank))
    (root / "latest").write_bytes(_pointer(1, 1))

    def save(rank: int) -> Callable[[Messages], object]:
        def run(messages: Messages) -> None:
            directory = "1" if in_place else "2"
            if rank == 0 and not in_place:
                os.mkdir(root / directory)
                _fsync(root)
                messages.set("made", b"")
            _wait(messages, "made" if not in_place else None)
            if rank == 0 and early:
                _move(root, directory)
            _write(root / directory / f"{rank}.bin", _shard(2, rank))
            _fsync(root / directory)
            messages.set(f"done{rank}", b"")
            if rank == 0:
                _wait(messages, "done1")
                if deletes_first:
                    for old in sorted((root / "1").iterdir()):
                        os.unlink(old)
                if not early:
                    _move(root, directory)
                messages.set("moved", b"")
            _wait(messages, "moved")

        return run

    return record(root, [save(0), save(1)])


def load_pointer(root: Path) -> int:
    pointer = json.loads((root / "latest").read_bytes())
    for rank in range(2):
        content = (root / pointer["directory"] / f"{rank}.bin").read_bytes()
        if sha256(content).hexdigest() != pointer["digests"][rank]:
            raise ValueError(f"the shard of rank {rank} is damaged")
    return int(pointer["step"])


def _pointer(step: int, directory: int) -> bytes:
    digests = [sha256(_shard(step, rank)).hexdigest() for rank in range(2)]
    return json.dumps({"step": step, "directory": str(directory), "digests": digests}).encode()


def _shard(step: int, rank: int) -> bytes:
    return bytes([step * 16 + rank]) * 8


def _move(root: Path, directory: str) -> None:
    _write(root / "latest.new", _pointer(2, int(directory)))
    os.rename(root / "latest.new", root / "latest")
    _fsync(root)


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _fsync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _wait(messages: Messages, key: str | None) -> None:
    while key and not messages.check([key]):
        pass
    if key:
        messages.get(key)
