"""Every collective and point-to-point call of a rank: seen, written down, compared over the ranks.

Importing this package imports no torch: the supervisor reads the logs that ranks leave.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .consistency import Consistency
    from .log import CallLog, LoggedCall, read_calls
    from .observer import Observer, observe

__all__ = ["CallLog", "Consistency", "LoggedCall", "Observer", "observe", "read_calls"]

_MODULES = {
    "CallLog": "log",
    "Consistency": "consistency",
    "LoggedCall": "log",
    "Observer": "observer",
    "observe": "observer",
    "read_calls": "log",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
