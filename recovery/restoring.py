"""The restore protocol: one candidate after the other, newest first, until all ranks agree on one.

For each candidate every rank reads the manifest and prepares its tensors; when the coordinator has
found that names, dtypes and shapes fit, every rank reads its part straight into the live tensors
and verifies it; when all succeeded, every rank puts its objects back. If any rank finds damage, all
go to the next older candidate together.

Guarantees: all ranks return the same step or raise; objects are put back only from a checkpoint
that every rank found whole; tensors that do not fit are found before anything is overwritten; what
is damaged is set aside only when an older checkpoint was found whole, so an outage of the storage,
or damage to all, never turns into "nothing was ever published".

Does not: keep the live tensors' old values. After any error but `MismatchError` they may be
anything. For the events see `seatrial.recovery.store`, which calls this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from . import plain
from .agreement import RanksFailed, agree
from .checkpointable import Checkpointable, TensorFacts
from .digest import digest
from .directory import CheckpointDirectory, PublishedManifest
from .errors import (
    CheckpointError,
    DamagedCheckpointError,
    ManifestError,
    MismatchError,
    NoValidCheckpointError,
)
from .exchange import Exchange
from .files import read_file, reading
from .garbage import collection_paused
from .layout import Part, local_parts, torch_dtype
from .manifest import Manifest
from .probe import around
from .reader import mismatches, read_parts

__all__ = ["RestoredStep", "Restorer"]

_DAMAGE = (DamagedCheckpointError, ManifestError)


@dataclass(frozen=True, kw_only=True)
class RestoredStep:
    """The manifest that was restored, and the newer steps that were found damaged, with reasons."""

    manifest: Manifest
    damaged: tuple[tuple[int, str], ...]


class _Damage(Exception):
    """The candidate is damaged on some rank; raised on all."""


class Restorer:
    """Restores for one rank."""

    def __init__(self, directory: CheckpointDirectory, exchange: Exchange) -> None:
        self._directory = directory
        self._exchange = exchange

    @collection_paused()
    def restore(self, state: Checkpointable, *, step: int | None) -> RestoredStep | None:
        """Restore the newest valid checkpoint, or exactly ``step``; None if nothing was published.

        Raises:
            NoValidCheckpointError: every published checkpoint is damaged.
            DamagedCheckpointError: ``step`` was asked for and is damaged.
            MismatchError: the checkpoint and ``state`` do not hold the same tensors.
            CheckpointError: ``step`` is not published, or a rank failed for another reason.
        """
        damaged: list[tuple[int, str]] = []
        candidates = self._candidates(step)
        for candidate in candidates:
            try:
                with around("restore", step=candidate):
                    manifest = self._restore_one(state, candidate, damaged)
                return RestoredStep(manifest=manifest, damaged=tuple(damaged))
            except _Damage as damage:
                damaged.append((candidate, str(damage)))
        if not candidates:
            return None
        reasons = "; ".join(f"step {number}: {reason}" for number, reason in damaged)
        if step is not None:
            raise DamagedCheckpointError(f"the checkpoint that was asked for is damaged: {reasons}")
        raise NoValidCheckpointError(
            f"none of the checkpoints in {self._directory.location} is valid ({reasons}). They "
            "were left in place; repair the storage, or start anew in another directory"
        )

    def _candidates(self, step: int | None) -> list[int]:
        round_ = self._exchange.open_round("restore")

        def decide(_: list[object]) -> object:
            return self._published(step)

        try:
            answer = agree(round_, "candidates", self._exchange.rank, lambda: None, decide)
        except RanksFailed as failed:
            raise failed.as_error(f"restore from {self._directory.location}") from failed.__cause__
        assert isinstance(answer, list)
        return answer

    def _published(self, step: int | None) -> list[int]:
        """On the coordinator: the steps to try, in order."""
        published = list(self._directory.storage.published())
        if step is None:
            quarantined = [] if published else self._directory.storage.quarantined()
            if quarantined:
                raise NoValidCheckpointError(
                    "only checkpoints that were found damaged are left, in quarantine: "
                    f"{', '.join(quarantined)}. Repair one and move it back, "
                    "or start anew in another directory"
                )
            return published[::-1]
        if step not in published:
            raise CheckpointError(f"step {step} is not published; published are {published}")
        return [step]

    def _restore_one(
        self, state: Checkpointable, step: int, damaged: Sequence[tuple[int, str]]
    ) -> Manifest:
        candidate = _Candidate(self._directory, self._exchange, state, step)
        round_ = self._exchange.open_round("candidate")
        rank = self._exchange.rank
        late: Exception | None = None

        def finish() -> None:
            if late is not None:
                raise late
            with around("restore/load", step=step):
                candidate.load()
            if self._exchange.is_coordinator:
                for number, reason in damaged:
                    with around("restore/quarantine", step=number):
                        self._directory.storage.quarantine(number, reason)

        try:
            agree(round_, "prepare", rank, candidate.prepare, candidate.check)
            try:
                agree(round_, "read", rank, candidate.read, event="restore/agree", step=step)
            except (RanksFailed, CheckpointError):
                raise
            except Exception as error:
                # All agreed and this rank failed right after: the others learn of it in `finish`.
                late = error
            agree(round_, "finish", rank, finish)
        except RanksFailed as failed:
            if failed.has(*_DAMAGE):
                raise _Damage(str(failed)) from failed.__cause__
            raise failed.as_error(f"restore of step {step}") from failed.__cause__
        assert candidate.published is not None
        return candidate.published.manifest


class _Candidate:
    """One rank's view of one checkpoint while it is tried."""

    def __init__(
        self,
        directory: CheckpointDirectory,
        exchange: Exchange,
        state: Checkpointable,
        step: int,
    ) -> None:
        self._directory = directory
        self._exchange = exchange
        self._state = state
        self._step = step
        self._parts: list[Part] = []
        self._shared: Mapping[str, object] = {}
        self._ranks: dict[int, Mapping[str, object]] = {}
        self.published: PublishedManifest | None = None

    def prepare(self) -> object:
        """Read the manifest and make the destinations; how they differ from what is stored."""
        path = self._directory.storage.manifest_path(self._step)
        with around("restore/manifest/read", step=self._step, file=path):
            self.published = self._directory.read_manifest(self._step)
        manifest = self.published.manifest
        self._state.prepare(
            {
                entry.name: TensorFacts(dtype=torch_dtype(entry.dtype), shape=entry.shape)
                for entry in manifest.tensors
            }
        )
        tensors = self._state.tensors()
        self._parts = local_parts(tensors)
        stored = {entry.name for entry in manifest.tensors}
        return {
            "manifest": digest(self.published.content),
            "absent": sorted(stored - tensors.keys()),
            "unexpected": sorted(tensors.keys() - stored),
            "different": mismatches(manifest, self._parts),
        }

    def check(self, views: list[object]) -> None:
        """On the coordinator: raise `MismatchError` unless all ranks' tensors fit together."""
        found = [view for view in views if isinstance(view, dict)]
        if len({view["manifest"] for view in found}) != 1:
            raise CheckpointError(
                f"the ranks read different manifests of step {self._step}; do all of them see the "
                f"same file system at {self._directory.location}?"
            )
        # Pipeline stages hold different tensors: missing is only what no rank has.
        missing = sorted(set.intersection(*(set(view["absent"]) for view in found)))
        unexpected = sorted({name for view in found for name in view["unexpected"]})
        different = sorted({text for view in found for text in view["different"]})
        if missing or unexpected or different:
            raise MismatchError(
                "the state does not fit the checkpoint: "
                f"missing here {missing}; not in the checkpoint {unexpected}; "
                f"different {different}. Nothing was overwritten"
            )

    def read(self) -> None:
        """Fill the live tensors and read the objects, everything verified."""
        assert self.published is not None
        manifest = self.published.manifest
        files = self._directory.files(manifest)
        read_parts(files, manifest, self._parts)
        for rank, entry in enumerate(manifest.objects):
            with around("restore/shard/read", step=self._step, file=files.path(entry.name)):
                content = reading(files, entry.name, partial(read_file, files, entry))
            shared, own = _objects(plain.loads(content), entry.name)
            self._ranks[rank] = own
            if rank == 0:
                self._shared = shared

    def load(self) -> None:
        """Hand the objects to the state."""
        self._state.load_objects(self._shared, self._ranks, self._exchange.rank)


def _objects(content: object, name: str) -> tuple[Mapping[str, object], Mapping[str, object]]:
    if isinstance(content, dict):
        shared, own = content.get("shared"), content.get("rank")
        if isinstance(shared, dict) and isinstance(own, dict):
            return shared, own
    raise ManifestError(f"{name} does not hold the plain data of a rank")
