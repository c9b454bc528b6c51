"""Storage that fails or lies while a job uses it: faults in single operations.

`striking` arms a schedule in this process; in a trial the ranks are armed by themselves. Whoever
stores through `seatrial.recovery` or through a ``chaos::`` URL of fsspec is struck. Torch-free.
"""

from __future__ import annotations

from .arming import arm, striking
from .operations import Operations

__all__ = ["Operations", "arm", "striking"]
