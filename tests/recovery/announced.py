"""What a save announces, and doing something at one of those points."""

from __future__ import annotations

from collections.abc import Callable

from seatrial.recovery.probe import listen

COMMIT = [
    "checkpoint/shard/write",
    "checkpoint/shard/fsync",
    "checkpoint/shard/write",
    "checkpoint/shard/fsync",
    "checkpoint/directory/fsync",
    "checkpoint/report",
    "checkpoint/gather",
    "checkpoint/manifest/write",
    "checkpoint/manifest/fsync",
    "checkpoint/manifest/link",
    "checkpoint/manifest/directory",
    "checkpoint/acknowledge",
    "checkpoint/collect",
    "checkpoint",
]


def once_at(event: str, edge: str, do: Callable[[], object]) -> None:
    """Call ``do`` the first time that ``event`` is announced in this process."""

    def listener(name: str, at: str, facts: dict[str, object]) -> None:
        if (name, at) == (event, edge):
            stop()
            do()

    stop = listen(listener)


def fail_at(event: str, edge: str, error: Exception) -> None:
    """Raise ``error`` the first time that ``event`` is announced."""

    def fail() -> None:
        raise error

    once_at(event, edge, fail)
