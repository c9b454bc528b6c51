"""One attempt to publish a step, seen from the coordinator: its directory, and its manifest.

Guarantees: no other attempt shares the directory; everything that leads to it is durable before the
manifest is visible; the step's directory is held open from `Attempt.begin` on, so an attempt whose
files were collected meanwhile cannot publish into a directory that took the name since; of several
attempts that publish a step exactly one wins, and the others raise.

Does not: write shards, or clean up after a failure: `seatrial.recovery.retention` does.
Torch-free; called by the writer for `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack
from pathlib import Path

from .directory import ATTEMPT_PREFIX, CheckpointDirectory
from .errors import AlreadyPublishedError, SaveError
from .publish import fsync_directory, open_directory, probe_publish, publish_at

__all__ = ["Attempt", "collected"]


class Attempt:
    """An attempt that `begin` made; `close` it when it is over, published or not."""

    def __init__(self, directory: CheckpointDirectory, step: int, name: str) -> None:
        self.name = name
        self._directory = directory
        self._step = step
        self._stack = ExitStack()
        self._step_directory = self._stack.enter_context(open_directory(directory.step(step)))

    @classmethod
    def begin(cls, directory: CheckpointDirectory, step: int) -> Attempt:
        """Make a directory that no other attempt has.

        Raises:
            AlreadyPublishedError: ``step`` is published.
            StorageUnsupportedError: the file system cannot publish exactly once.
        """
        root = directory.root
        made = [path for path in (root, *root.parents) if not path.exists()]
        root.mkdir(parents=True, exist_ok=True)
        for path in made:
            fsync_directory(path.parent)
        probe_publish(root)
        if directory.is_published(step):
            raise AlreadyPublishedError(
                f"{directory.manifest(step)} exists; resume from it, or remove the step's "
                "directory to save it again"
            )
        name = f"{ATTEMPT_PREFIX}{secrets.token_hex(8)}"
        directory.step(step).mkdir(exist_ok=True)
        directory.attempt(step, name).mkdir()
        return cls(directory, step, name)

    @property
    def path(self) -> Path:
        """Where the attempt's files go."""
        return self._directory.attempt(self._step, self.name)

    def publish(self, content: bytes) -> None:
        """Publish ``content`` as the manifest; every file that it names must be durable.

        Raises:
            AlreadyPublishedError: another attempt won.
            SaveError: the step's directory was collected meanwhile.
        """
        # The manifest must never outlive what it names.
        os.fsync(self._step_directory)
        fsync_directory(self._directory.root)
        path = self._directory.manifest(self._step)
        try:
            publish_at(
                self._step_directory, path, content, event="checkpoint/manifest", step=self._step
            )
        except FileNotFoundError as error:
            raise collected(path.parent) from error
        if not self._is_in_place():
            raise collected(path.parent)

    def _is_in_place(self) -> bool:
        try:
            found = os.stat(self._directory.step(self._step), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(self._step_directory), found)

    def close(self) -> None:
        """Let go of the step's directory; may be called again."""
        self._stack.close()


def collected(directory: Path) -> SaveError:
    """The error of an attempt whose files another attempt has taken for leftovers."""
    return SaveError(
        f"{directory} was collected while this attempt was saving; another attempt has taken over"
    )
