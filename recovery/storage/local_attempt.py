"""One attempt to publish a step in a POSIX directory, seen from the coordinator.

Guarantees: no other attempt shares the directory; everything that leads to it is durable before the
manifest is visible; the step's directory is held open from the beginning, so an attempt whose files
were collected meanwhile cannot publish into a directory that took the name since; of several
attempts that publish a step exactly one wins, and the others raise.

Does not: write shards, or clean up after a failure unless `LocalAttempt.abandon` is called.
Torch-free; made by `seatrial.recovery.storage.local`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from ..errors import SaveError
from ..probe import perform
from ..publish import open_directory, publish_at
from .names import MANIFEST

__all__ = ["LocalAttempt", "collected"]


class LocalAttempt:
    """An attempt whose directory exists; ``fsync_parents`` makes what leads to its step durable."""

    def __init__(self, directory: Path, step: int, fsync_parents: Callable[[], None]) -> None:
        self._directory = directory
        self._step = step
        self._fsync_parents = fsync_parents
        self._durable = False
        self._stack = ExitStack()
        self._step_directory = self._stack.enter_context(open_directory(directory.parent))

    @property
    def name(self) -> str:
        return self._directory.name

    def fsync(self) -> None:
        place = str(self._directory.parent)
        perform("storage/sync", lambda _: os.fsync(self._step_directory), file=place)
        self._fsync_parents()
        self._durable = True

    def publish(self, content: bytes, sizes: Mapping[str, int]) -> None:
        if not self._durable:
            self.fsync()  # The manifest must never outlive what it names.
        place = self._directory.parent
        event, directory = "checkpoint/manifest", self._step_directory
        try:
            publish_at(directory, place / MANIFEST, content, event=event, step=self._step)
        except FileNotFoundError as error:
            raise collected(str(place)) from error
        if not self._is_in_place():
            raise collected(str(place))

    def _is_in_place(self) -> bool:
        try:
            found = os.stat(self._directory.parent, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(self._step_directory), found)

    def abandon(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        self._stack.close()


def collected(place: str) -> SaveError:
    """The error of an attempt whose files another attempt has taken for leftovers."""
    return SaveError(
        f"{place} was collected while this attempt was saving; another attempt has taken over"
    )
