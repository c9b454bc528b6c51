"""The tiny job, which also writes a file of its own beside its checkpoints, through ``chaos::``."""

from __future__ import annotations

import os
from typing import Any

import fsspec
from tiny_job import TinyJob

from seatrial.plugins.jobs.protocol import StepReport


class SideFileJob(TinyJob):
    def step(self, context: Any) -> StepReport:
        report = super().step(context)
        place = os.path.join(context.directory, f"side-{context.rank}")
        with fsspec.open(f"chaos::file://{place}", "wb") as file:
            file.write(b"%d" % context.attempt)
        with fsspec.open(f"chaos::file://{place}", "rb") as file:
            if file.read() != b"%d" % context.attempt:
                raise RuntimeError(f"{place} does not hold what was written to it")
        return report
