"""What the ranks of a run did with their time, and which of them the others waited for.

Importing this package imports no torch. Timing is told, and never judged: no verdict depends on it.
"""

from __future__ import annotations

from .stragglers import Straggler
from .times import StepTimes
from .timing import Timing, read_timing

__all__ = ["StepTimes", "Straggler", "Timing", "read_timing"]
