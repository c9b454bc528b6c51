"""What must come back after a fault: checkpoints, training state, and their equality.

Importing this package imports no torch; names that need it are looked up when they are used, so a
supervisor can import `inspect_store`, `listen` and the errors and stay light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .buffers import settle_buffers
    from .dcp import SeatrialReader, SeatrialWriter
    from .inspect import StoreReport, inspect_store
    from .manifest import Manifest
    from .probe import around, listen
    from .state import TrainingState
    from .store import CheckpointInfo, CheckpointStore, Restored, SaveHandle
    from .topology import Topology

__all__ = [
    "CheckpointInfo",
    "CheckpointStore",
    "Manifest",
    "Restored",
    "SaveHandle",
    "SeatrialReader",
    "SeatrialWriter",
    "StoreReport",
    "Topology",
    "TrainingState",
    "around",
    "inspect_store",
    "listen",
    "settle_buffers",
]

_MODULES = {
    "CheckpointInfo": "store",
    "CheckpointStore": "store",
    "Manifest": "manifest",
    "Restored": "store",
    "SaveHandle": "store",
    "SeatrialReader": "dcp",
    "SeatrialWriter": "dcp",
    "StoreReport": "inspect",
    "Topology": "topology",
    "TrainingState": "state",
    "around": "probe",
    "inspect_store": "inspect",
    "listen": "probe",
    "settle_buffers": "buffers",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
