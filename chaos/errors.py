"""Every error that `seatrial.chaos` raises, and the one that it injects."""

from __future__ import annotations

__all__ = [
    "ChaosError",
    "FaultSyntaxError",
    "ImpossibleFaultError",
    "InjectedError",
    "LaunchError",
    "NondeterministicJobError",
    "ReferenceFailedError",
    "UsageError",
]


class ChaosError(Exception):
    """Base of all errors of this package."""


class UsageError(ChaosError, ValueError):
    """Something the user wrote cannot be run; the message is one sentence that says why."""


class FaultSyntaxError(UsageError):
    """A fault or schedule that does not parse."""


class ImpossibleFaultError(UsageError):
    """A fault that could never fire in the job it is meant for."""


class NondeterministicJobError(UsageError):
    """Two uninterrupted runs of the job differ, so nothing can be proved about a third."""


class ReferenceFailedError(UsageError):
    """The job does not even finish when nothing is done to it."""


class LaunchError(ChaosError):
    """Processes could not be started or supervised."""


class InjectedError(RuntimeError):
    """The exception that a ``raise`` fault throws into the job."""
