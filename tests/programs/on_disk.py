"""A process that is a rank on the disk that observes, and what the disk saw of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from seatrial.chaos.trace import Record, disk_trace, read_trace


class OnDisk:
    """A rank in ``store``; what the disk saw of it."""

    def __init__(self, store: Path, trace: Path) -> None:
        self.store = store
        self._trace = trace

    @property
    def records(self) -> list[Record]:
        return read_trace(disk_trace(self._trace))

    def of(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]

    @property
    def changes(self) -> list[str]:
        """What the faults made of operations."""
        return [f"{record['event']}: {record['change']}" for record in self.of("operation")]

    @property
    def operations(self) -> list[str]:
        """Every operation that a fault waited for, with the name of its file."""
        begun = [record for record in self.of("event") if record["edge"] == "before"]
        return [
            f"{str(each['event'])[len('storage/') :]} {os.path.basename(str(each['file']))}"
            for each in begun
        ]


Armed = Callable[[str], AbstractContextManager[OnDisk]]
