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
from pathlib import Path

Record = dict[str, object]


class TraceWriter:
    """Appends to ``path``. Safe to use from several threads of one process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def record(self, kind: str, /, **fields: object) -> None:
        """Append one record; ``kind`` is stored under ``kind`` and the time under ``t``."""
        line = json.dumps({"kind": kind, "t": time.monotonic(), **fields}, separators=(",", ":"))
        os.write(self._file, line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


def disk_trace(path: Path) -> Path:
    """Where the disk writes what it saw of the rank whose trace is ``path``."""
    return path.with_suffix(".disk.jsonl")


def read_trace(path: Path) -> list[Record]:
    """All whole records of a trace, oldest first; an absent file is an empty trace."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    whole = data[: data.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()]


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
    for line in reversed(lines if start == 0 else lines[1:]):
        record: Record = json.loads(line)
        if record["kind"] == kind:
            return record
    return None
