"""The checkpoint store: save, restore, verify and prune in one local or shared POSIX directory.

Guarantees: a checkpoint exists exactly when its manifest does, and then all its bytes are durable;
`save` and `restore` end alike on all ranks; every byte that is restored was verified; deletion
follows the rule in `seatrial.recovery.retention`. Nothing that is loaded can execute code.

Does not: retry a failed save, or serve two live runs in one directory.

`save`, `save_async` and `restore` are collective: all ranks of the exchange call them in the same
order, in one thread. The rest is local and may be called anywhere.

Events, with ``step`` and, where it says so, ``file`` (a full path):

    checkpoint                        the whole save
      checkpoint/shard/write          each rank, its shard file and then its object file (file)
      checkpoint/shard/fsync          likewise (file)
      checkpoint/directory/fsync      each rank (file); the coordinator: its parents too
      checkpoint/report               each rank posts what it wrote, or its error
      checkpoint/gather               coordinator
      checkpoint/manifest/write       coordinator (file), then /fsync, /link and /directory
      checkpoint/acknowledge          each rank: the coordinator announces the outcome
      checkpoint/collect              coordinator, after success; also after a restore
    restore                           one candidate; no ``after`` if it is found damaged
      restore/manifest/read           each rank (file)
      restore/shard/read              each rank, each file that it needs (file)
      restore/agree                   each rank: valid everywhere, or not
      restore/load                    each rank, its objects
      restore/quarantine              coordinator, each damaged step
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from . import retention
from .background import Background, SaveHandle
from .checkpointable import Checkpointable
from .digest import DEFAULT, require_algorithm
from .directory import CheckpointDirectory
from .errors import CheckpointError, DamagedCheckpointError, ManifestError, RecoveryError
from .exchange import TIMEOUT_S, Exchange
from .guards import Guard
from .inspect import step_problems
from .manifest import Manifest, checked_step
from .probe import around, probe
from .restoring import Restorer
from .saving import Labels, Saver
from .staging import Staging
from .storage import absolute
from .storage.local import LocalStorage

__all__ = ["CheckpointInfo", "CheckpointStore", "Restored", "SaveHandle"]


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A published checkpoint. ``problem`` is None if its manifest is whole; files are not read.

    ``verified``: a restore or `CheckpointStore.verify` found every byte as saved.
    """

    step: int
    problem: str | None = None
    attempt: str | None = None
    parent_step: int | None = None
    topology: str | None = None
    world_size: int | None = None
    size_bytes: int = 0
    verified: bool = False


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a restore did. ``damaged``: newer steps passed over, and why; they are in quarantine.

    ``collected``: leftovers deleted afterwards, on the coordinator alone.
    """

    step: int
    manifest: Manifest
    damaged: tuple[tuple[int, str], ...] = ()
    collected: tuple[str, ...] = ()


class CheckpointStore:
    """Checkpoints in ``directory``, a path or URL, which all ranks see.

    Args:
        exchange: how ranks talk; by default over the default process group's store, looked up at
            the first `save` or `restore`.
        keep_last: how many of the newest checkpoints are kept at least; 1 or more.
        keep_every: steps that it divides are kept as well, for good; None for no such steps.
        topology, writer, run: kept in every manifest; see `Manifest`.
        digest: algorithm of the digests that are written, ``xxh3_128`` or ``blake3``; all are read.
        timeout_s: of the exchange, if none is given; see `Exchange.from_process_group`.
        storage_options: for a URL, what fsspec's file system takes, such as ``endpoint_url``.
        single_writer: for a URL whose storage cannot publish exactly once: nobody but this job,
            one attempt at a time, ever saves there.
        guards: asked before every save, which they may refuse; see `seatrial.recovery.guards`. The
            same on every rank.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        exchange: Exchange | None = None,
        keep_last: int = 2,
        keep_every: int | None = None,
        topology: str = "",
        writer: Mapping[str, object] | None = None,
        run: Mapping[str, object] | None = None,
        digest: str = DEFAULT,
        timeout_s: float = TIMEOUT_S,
        storage_options: Mapping[str, object] | None = None,
        single_writer: bool = False,
        guards: Sequence[Guard] = (),
    ) -> None:
        retention.check_rule(keep_last, keep_every)
        self._directory = CheckpointDirectory.at(
            absolute(directory), storage_options=storage_options, single_writer=single_writer
        )
        self._exchange = exchange
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._labels = Labels(topology=topology, writer=dict(writer or {}), run=dict(run or {}))
        self._algorithm = require_algorithm(digest)
        self._timeout_s = timeout_s
        self._guards = tuple(guards)
        self._parent_step: int | None = None
        self._background = Background()
        self._background_lane: Exchange | None = None
        self._staging = Staging()

    @property
    def location(self) -> str:
        """The absolute path or the URL of the checkpoints."""
        return self._directory.location

    @property
    def directory(self) -> Path:
        """The directory; raises `CheckpointError` where the checkpoints are below a URL."""
        storage = self._directory.storage
        if not isinstance(storage, LocalStorage):
            raise CheckpointError(f"{self.location} is no directory; use location")
        return storage.root

    @property
    def exchange(self) -> Exchange:
        """The exchange in use; made from the default process group if none was given."""
        if self._exchange is None:
            self._exchange = Exchange.from_process_group(timeout_s=self._timeout_s)
        return self._exchange

    def save(self, state: Checkpointable, *, step: int) -> Manifest:
        """Save ``state`` as ``step`` on all ranks; on return it is published and durable.

        Raises:
            SaveError: on all ranks alike, naming the rank and the cause.
            AlreadyPublishedError: a `SaveError`; the step is published already.
        """
        step = checked_step(step)
        self._background.settle()
        with around("checkpoint", step=step):
            manifest = self._saver.save(state, step=step, parent_step=self._parent_step)
            self._end_save(step)
        return manifest

    def save_async(self, state: Checkpointable, *, step: int) -> SaveHandle:
        """Begin to save ``state`` as ``step`` on all ranks, and go on when it is copied.

        First waits for the save in flight, of which there is at most one. Then the ranks agree on
        who stores what, and each copies what it stores into memory that is kept for the next call,
        as much as its shard file is large. Whatever happens to ``state`` afterwards is not in the
        checkpoint. The rest goes on in a thread: writing, and the manifest when all ranks are
        durable. Its events are announced there, ``checkpoint`` before in this thread.

        Returns:
            The handle; its ``wait`` returns or raises as `save` does.

        Raises:
            SaveError: this step could not be planned; or, as from `save`, `restore` and `prune`, an
                earlier background save failed and its handle's ``wait`` was never called.
        """
        step = checked_step(step)
        self._background.settle()
        probe("checkpoint", "before", step=step)
        if self._background_lane is None:
            self._background_lane = self.exchange.lane("background")
        round_ = self._background_lane.open_round("save")
        planned = self._saver.begin(round_, state, step=step, parent_step=self._parent_step)
        planned.copy_tensors(self._staging.copy)

        def finish() -> Manifest:
            manifest = planned.finish()
            self._end_save(step)
            probe("checkpoint", "after", step=step)
            return manifest

        return self._background.start(step, finish)

    @cached_property
    def _saver(self) -> Saver:
        return Saver(
            self._directory,
            self.exchange,
            labels=self._labels,
            algorithm=self._algorithm,
            guards=self._guards,
        )

    def _end_save(self, step: int) -> None:
        self._parent_step = step
        self._collect(step)

    def restore(self, state: Checkpointable, *, step: int | None = None) -> Restored | None:
        """Restore the newest valid checkpoint, or exactly ``step``, into ``state`` on all ranks.

        Returns:
            None if nothing was ever published; ``state`` is then untouched.

        Raises:
            NoValidCheckpointError: all published checkpoints are damaged; nothing was moved.
            DamagedCheckpointError: ``step`` is damaged; nothing was moved.
            MismatchError: ``state`` holds other tensors; nothing was overwritten.
            CheckpointError: a rank failed for another reason; nothing was moved.
        """
        if step is not None:
            step = checked_step(step)
        self._background.settle()
        restorer = Restorer(self._directory, self.exchange)
        found = restorer.restore(state, step=step)
        if found is None:
            return None
        restored_step = found.manifest.step
        self._parent_step = restored_step
        if self.exchange.is_coordinator:
            retention.note_verified(self._directory, restored_step, found.manifest.attempt)
        collected = self._collect(restored_step)
        return Restored(
            step=restored_step,
            manifest=found.manifest,
            damaged=found.damaged,
            collected=tuple(collected),
        )

    def latest(self) -> int | None:
        """The highest step whose manifest is whole; its files are not read.

        Raises:
            CheckpointError: whether a manifest is whole cannot be told: it cannot be read at the
                moment, or another release wrote it. An older step would silently lose work.
            OSError: the place cannot be listed.
        """
        for step in reversed(self._directory.storage.published()):
            try:
                self._directory.read_manifest(step)
            except (DamagedCheckpointError, ManifestError):
                continue
            except OSError as error:
                raise CheckpointError(
                    f"step {step} is published, and its manifest cannot be read: {error}"
                ) from error
            return step
        return None

    def list(self) -> list[CheckpointInfo]:
        """The published checkpoints, lowest step first."""
        return [self._info(step) for step in self._directory.storage.published()]

    def _info(self, step: int) -> CheckpointInfo:
        try:
            manifest = self._directory.read_manifest(step).manifest
        except (RecoveryError, OSError) as error:
            return CheckpointInfo(step=step, problem=str(error))
        return CheckpointInfo(
            step=step,
            attempt=manifest.attempt,
            parent_step=manifest.parent_step,
            topology=manifest.topology,
            world_size=manifest.world_size,
            size_bytes=manifest.size_bytes,
            verified=self._directory.verified_attempt(step) == manifest.attempt,
        )

    def verify(self, step: int) -> Sequence[str]:
        """Check every digest of ``step`` again and list what is wrong; a clean one is recorded.

        What was found is returned also where it cannot be recorded, with a warning.
        """
        problems = step_problems(self._directory, step)
        if not problems:
            attempt = self._directory.read_manifest(step).manifest.attempt
            retention.note_verified(self._directory, step, attempt)
        return problems

    def prune(self) -> Sequence[str]:
        """Verify the newest checkpoint, then delete by the rule; what was deleted.

        Local: call it on one rank, while no rank saves.
        """
        self._background.settle()
        published = self._directory.storage.published()
        if published:
            retention.verify(self._directory, published[-1])
        return retention.collect(
            self._directory, keep_last=self._keep_last, keep_every=self._keep_every
        )

    def _collect(self, step: int) -> Sequence[str]:
        if not self.exchange.is_coordinator:
            return []
        with around("checkpoint/collect", step=step):
            try:
                return retention.collect(
                    self._directory, keep_last=self._keep_last, keep_every=self._keep_every
                )
            except (OSError, CheckpointError) as error:
                # The checkpoint is safe; what is lost is space, and the next save tries again.
                warnings.warn(
                    f"leftovers in {self._directory.location} could not be deleted: {error}",
                    RuntimeWarning,
                    stacklevel=3,
                )
                return []
