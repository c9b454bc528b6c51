"""Training programs that can be put on trial, and what is needed to write one.

Importing this package imports no torch; the names below do when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seatrial.chaos.launch.context import RankContext
    from seatrial.recovery.state import TrainingState

    from .protocol import Job, StepReport

__all__ = ["Job", "RankContext", "StepReport", "TrainingState"]

_MODULES = {
    "Job": "seatrial.plugins.jobs.protocol",
    "RankContext": "seatrial.chaos.launch.context",
    "StepReport": "seatrial.plugins.jobs.protocol",
    "TrainingState": "seatrial.recovery.state",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
