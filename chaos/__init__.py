"""What goes wrong, when, and what happened: faults, supervised runs, and verdicts.

Importing this package imports no torch; only ranks do.
"""

from __future__ import annotations

from .case import Verdict
from .events import At
from .fault import Fault
from .schedule import Schedule

__all__ = ["At", "Fault", "Schedule", "Verdict"]
