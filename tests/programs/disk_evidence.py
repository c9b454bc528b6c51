"""Evidence of a run on a disk that observes, whose job saves by its own code."""

from __future__ import annotations

import signal
from dataclasses import replace

from evidence import Evidence

from seatrial.chaos.launch.plan import trace_file
from seatrial.chaos.trace import TraceWriter, disk_trace

KILL = "kill rank=1 at=step:5/data"
KILLED = {0: 1, 1: -signal.SIGKILL}
FILE = "/disk/store/ckpt-4/rank-1"
CORRUPT = "corrupt rank=1 at=step:4/storage/write"


class DiskEvidence(Evidence):
    """A run whose job saves by its own code, on a disk that observes."""

    def saw(self, rank: int, attempt: int, kind: str, **fields: object) -> None:
        trace = TraceWriter(disk_trace(trace_file(self.directory, attempt, rank)))
        trace.record(kind, **{"t": 10.0 * attempt - 2, "via": "disk", **fields})  # type: ignore[arg-type]
        trace.close()

    def is_the_jobs(self) -> None:
        """The last attempt's checkpoints are the job's own."""
        store = replace(self.attempts[-1].store, own=True)
        self.attempts[-1] = replace(self.attempts[-1], store=store)
