"""The append-only log of what one rank did, one JSON object a line.

Guarantees: a record is one ``write`` to a file opened for appending, so everything recorded before
a SIGKILL is readable afterwards and a reader at any moment sees whole records, but perhaps a torn
last line, which it drops. Times are ``CLOCK_MONOTONIC`` seconds, comparable across the processes of
one machine. A trace has one writer: what a disk saw of a rank is in a file of its own beside it.
Does not survive a power cut; it is evidence about processes, not about disks.
"""

from __future__ import annotations

import json
import os
import time
from functools import lru_cache
from pathlib import Path

Record = dict[str, object]

_LONG_S = 0.001


class TraceWriter:
    """Appends to ``path``. Safe to use from several threads of one process.

    ``blocked_s`` is what long writes took, as where the disk is busy.
    """

    def __init__(self, path: Path) -> None:
        self.blocked_s = 0.0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def record(self, kind: str, /, **fields: object) -> None:
        """Append one record; ``kind`` is stored under ``kind`` and the time under ``t``."""
        line = json.dumps({"kind": kind, "t": time.monotonic(), **fields}, separators=(",", ":"))
        began = time.monotonic()
        os.write(self._file, line.encode() + b"\n")  # begins as `_beginning` says
        took_s = time.monotonic() - began
        if took_s > _LONG_S:
            self.blocked_s += took_s

    def close(self) -> None:
        os.close(self._file)


def disk_trace(path: Path) -> Path:
    """Where the disk writes what it saw of the rank whose trace is ``path``."""
    return path.with_suffix(".disk.jsonl")


def read_trace(path: Path) -> list[Record]:
    """All whole records of a trace, oldest first; an absent file is an empty trace.

    The records are shared with whoever reads the same trace: they are not to be changed.
    """
    try:
        status = path.stat()
        return list(_whole_records(path, status.st_ino, status.st_mtime_ns, status.st_size))
    except FileNotFoundError:
        return []


def forget_traces() -> None:
    """Let go of what `read_trace` keeps."""
    _whole_records.cache_clear()


@lru_cache(maxsize=64)
def _whole_records(path: Path, inode: int, mtime_ns: int, size_bytes: int) -> list[Record]:
    """Kept, because every question about a run is asked of the same traces."""
    with path.open("rb") as file:
        data = file.read(size_bytes)
    whole = data[: data.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()]


def _beginning(kind: str) -> bytes:
    """How the line of every record of a kind begins, so that others need not be decoded."""
    return b'{"kind":%s,' % json.dumps(kind).encode()


def read_last(path: Path, kind: str, *, window_bytes: int = 65536) -> Record | None:
    """The newest record of one kind among the last ``window_bytes`` of a trace, if any."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - window_bytes)
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return None
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    beginning = _beginning(kind)
    for line in reversed(lines if start == 0 else lines[1:]):
        if line.startswith(beginning):
            record: Record = json.loads(line)
            return record
    return None
