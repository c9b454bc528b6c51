"""The save protocol: plan, write, report, commit, acknowledge.

0. guards, if there are any: all ranks are asked whether their state is worth saving.
1. plan: every rank posts the layout of its tensors; the coordinator gives each distinct part to one
   rank, makes a directory for this attempt and announces both. Nothing was written so far.
2. write: every rank writes and fsyncs its shard and its plain data, then the directory.
3. report: every rank posts sizes and digests, or its error.
4. commit: only when all reported success, the coordinator publishes the manifest.
5. acknowledge: the coordinator announces the outcome, and all ranks return or raise alike.

Guarantees: a kill at any moment leaves the step published and whole, or not published at all; an
exception on any rank is raised on all. What the manifest names is durable before the manifest is
visible. A coordinator that was taken for dead cannot publish into a directory that was collected.

Does not: compare the bits of replicas, unless a guard does. Every rank saves the same steps in the
same order. For the events see `seatrial.recovery.store`, which calls this.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from . import plain
from .agreement import Failure, RanksFailed, decode, decode_all, encode_failures, encode_value
from .checkpointable import Checkpointable
from .digest import DEFAULT
from .directory import CheckpointDirectory
from .errors import AlreadyPublishedError, CheckpointError, SaveError, SilentRanksError
from .exchange import COORDINATOR, Exchange, Round
from .garbage import collection_paused
from .guards import Guard, ask
from .layout import CHUNK_BYTES, Part, Region, local_parts, split
from .manifest import Chunk, FileEntry, Manifest, ShardEntry, TensorEntry
from .planning import Assignment, Planner
from .probe import around
from .storage import Attempt
from .writer import write_object_file, write_shard_file

__all__ = ["Labels", "PlannedSave", "Saver"]


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What a manifest says besides its content; see `Manifest`."""

    topology: str = ""
    writer: Mapping[str, object] = field(default_factory=dict)
    run: Mapping[str, object] = field(default_factory=dict)


class Saver:
    """Saves for one rank."""

    def __init__(
        self,
        directory: CheckpointDirectory,
        exchange: Exchange,
        *,
        labels: Labels,
        algorithm: str = DEFAULT,
        guards: Sequence[Guard] = (),
    ) -> None:
        self._directory = directory
        self._exchange = exchange
        self._labels = labels
        self._algorithm = algorithm
        self._guards = tuple(guards)
        self._planner = Planner(exchange)

    def save(self, state: Checkpointable, *, step: int, parent_step: int | None) -> Manifest:
        """Save on all ranks; returns the same manifest on each.

        Raises:
            SaveError: on all ranks, naming the failed ones. Nothing was published, unless
                it says so.
            AlreadyPublishedError: on all ranks; the step holds something else.
        """
        round_ = self._exchange.open_round("save")
        return self.begin(round_, state, step=step, parent_step=parent_step).finish()

    def begin(
        self, round_: Round, state: Checkpointable, *, step: int, parent_step: int | None
    ) -> PlannedSave:
        """Plan on all ranks; the `PlannedSave` must be finished before the next one begins.

        Raises:
            SaveError: as `save`; nothing is left open.
        """
        save = PlannedSave(self, round_, step, parent_step)
        with save.named_errors():
            if self._guards:
                ask(self._guards, round_, state, rank=self._exchange.rank, step=step)
            save.plan(state)
        return save


class PlannedSave:
    """One save on one rank: what it writes is decided, and the state's objects are captured.

    The tensors are those of the live state until `copy_tensors`.
    """

    def __init__(self, saver: Saver, round_: Round, step: int, parent_step: int | None) -> None:
        self._saver = saver
        self._round = round_
        self._stack = ExitStack()  # what stays open until the save is over
        self._step = step
        self._parent_step = parent_step
        self._exchange = saver._exchange
        self._directory = saver._directory
        self._rank = saver._exchange.rank
        self._attempt: Attempt | None = None  # the coordinator's
        self._objects = b""
        self._copy_error: Exception | None = None

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Raise what is caught as `SaveError`; whatever is open is closed after any error."""
        try:
            yield
        except BaseException as error:
            self._stack.close()
            if isinstance(error, RanksFailed):
                self._saver._planner.forget()
                kind = AlreadyPublishedError if error.has(AlreadyPublishedError) else SaveError
                raise kind(f"step {self._step} was not saved: {error}") from error.__cause__
            if isinstance(error, CheckpointError):
                self._saver._planner.forget()
                if not isinstance(error, SaveError):
                    raise SaveError(f"step {self._step} was not saved: {error}") from error
            raise

    @collection_paused()
    def plan(self, state: Checkpointable) -> None:
        def capture() -> Sequence[Part]:
            shared = state.shared_objects() if self._exchange.is_coordinator else {}
            content = {"shared": dict(shared), "rank": dict(state.rank_objects())}
            self._objects = plain.dumps(content, name="state")
            return local_parts(state.tensors())

        self._assignment = self._saver._planner.plan(
            self._round, self._step, capture, self._begin_attempt
        )

    def copy_tensors(self, copy: Callable[[Sequence[Part]], Sequence[Part]]) -> None:
        """Write from what ``copy`` returns; an error in it is this rank's, told in `finish`."""
        try:
            self._assignment = replace(self._assignment, parts=copy(self._assignment.parts))
        except Exception as error:
            self._copy_error = error

    def finish(self) -> Manifest:
        """Write, report, commit and acknowledge; raises as `Saver.save`."""
        with self.named_errors(), self._stack:
            return self._finish(self._round, self._assignment)

    def _finish(self, round_: Round, assignment: Assignment) -> Manifest:
        cause = self._report(round_, assignment)
        outcome = b""
        if self._exchange.is_coordinator:
            outcome, error = self._commit(round_, assignment)
            cause = cause or error
        outcome, error = self._acknowledge(round_, outcome, assignment.attempt)
        cause = cause or error
        try:
            content = decode(outcome)
        except RanksFailed as failed:
            raise failed from cause
        if cause is not None:
            raise SaveError(
                f"step {self._step} was published, but rank {self._rank} failed after its report: "
                f"{Failure.of(cause)}"
            ) from cause
        return Manifest.from_bytes(content)

    def _begin_attempt(self) -> str:
        """On the coordinator: make a place that no other attempt has, and name it."""
        self._attempt = self._directory.storage.begin(self._step)
        self._stack.callback(self._attempt.close)
        return self._attempt.name

    def _report(self, round_: Round, assignment: Assignment) -> Exception | None:
        """Write, and post what was written or why it was not; returns the error if any."""
        cause: Exception | None = None
        try:
            message = encode_value(json.dumps(self._write(assignment)).encode())
        except Exception as error:
            cause, message = error, encode_failures({self._rank: Failure.of(error)})
        posted = False
        try:
            with around("checkpoint/report", step=self._step):
                round_.post("report", message)
                posted = True
        except Exception as error:
            cause = cause or error
            if not posted:
                round_.post("report", encode_failures({self._rank: Failure.of(error)}))
        return cause

    def _write(self, assignment: Assignment) -> object:
        if self._copy_error is not None:
            raise self._copy_error
        algorithm = self._saver._algorithm
        files = self._directory.storage.files(self._step, assignment.attempt)
        base = f"rank-{self._rank:05d}"
        shard, chunks = write_shard_file(
            files,
            _shard_name(self._rank),
            assignment.parts,
            step=self._step,
            chunk_bytes=CHUNK_BYTES,
            algorithm=algorithm,
        )
        entry = write_object_file(
            files, f"{base}.json", self._objects, step=self._step, algorithm=algorithm
        )
        if files.fsyncs:
            with around("checkpoint/directory/fsync", step=self._step, file=files.path()):
                files.fsync()
                if self._attempt is not None:
                    # Before the manifest is linked: it must never outlive what it names.
                    self._attempt.fsync()
        return [vars(shard), vars(entry), [[c.offset, c.length, c.digest] for c in chunks]]

    def _commit(self, round_: Round, assignment: Assignment) -> tuple[bytes, Exception | None]:
        """On the coordinator: publish if all ranks reported success; the message for all."""
        try:
            with around("checkpoint/gather", step=self._step):
                messages = round_.collect("report")
                reports = [json.loads(value) for value in decode_all(messages)]
        except RanksFailed as failed:
            # Every rank has reported, so none writes any more. The space may be what was lacking.
            self._begun.abandon()
            return encode_failures(failed.failures), None
        except SilentRanksError as error:
            files = self._directory.storage.files(self._step, assignment.attempt)
            late = ", ".join(files.path(_shard_name(rank)) for rank in error.ranks)
            named = SilentRanksError(f"{error}; not reported as written: {late}", error.ranks)
            return encode_failures({COORDINATOR: Failure.of(named)}), error
        except Exception as error:
            return encode_failures({COORDINATOR: Failure.of(error)}), error
        try:
            manifest = self._manifest(assignment, reports)
            content = manifest.to_bytes()
            self._begun.publish(content, manifest.file_sizes)
            return encode_value(content), None
        except Exception as error:
            return self._failure(error, assignment.attempt), error

    @collection_paused()
    def _manifest(self, assignment: Assignment, reports: Sequence[list[Any]]) -> Manifest:
        shards, objects = [], []
        tensors: dict[str, tuple[Region, list[Chunk]]] = {}
        for (shard, entry, chunks), regions in zip(reports, assignment.regions, strict=True):
            shards.append(ShardEntry(**shard))
            objects.append(FileEntry(**entry))
            pieces = (piece for region in regions for piece in split(region, CHUNK_BYTES))
            for region, (offset, length, digest) in zip(pieces, chunks, strict=True):
                tensors.setdefault(region.name, (region, []))[1].append(
                    Chunk(
                        file=shards[-1].name,
                        offset=offset,
                        length=length,
                        digest=digest,
                        offsets=region.offsets,
                        sizes=region.sizes,
                    )
                )
        labels = self._saver._labels
        return Manifest(
            step=self._step,
            parent_step=self._parent_step,
            attempt=assignment.attempt,
            topology=labels.topology,
            world_size=self._exchange.world_size,
            writer=labels.writer,
            run=labels.run,
            shards=tuple(shards),
            objects=tuple(objects),
            tensors=tuple(
                TensorEntry(name=name, dtype=region.dtype, shape=region.shape, chunks=tuple(chunks))
                for name, (region, chunks) in sorted(tensors.items())
            ),
        )

    @property
    def _begun(self) -> Attempt:
        assert self._attempt is not None
        return self._attempt

    def _failure(self, error: Exception, attempt: str) -> bytes:
        """The message for an error of the coordinator; says so if the manifest is there."""
        failure = Failure.of(error)
        try:
            published = self._directory.read_manifest(self._step).manifest.attempt == attempt
        except (CheckpointError, OSError):
            published = False
        if published:
            failure = Failure(
                SaveError.__name__, f"{failure}; the manifest is there, but not acknowledged"
            )
        return encode_failures({COORDINATOR: failure})

    def _acknowledge(
        self, round_: Round, outcome: bytes, attempt: str
    ) -> tuple[bytes, Exception | None]:
        """Announce the outcome, or receive it; also what this rank itself failed with."""
        received: bytes | None = None
        try:
            with around("checkpoint/acknowledge", step=self._step):
                if self._exchange.is_coordinator:
                    round_.announce("commit", outcome)
                received = round_.receive("commit")
        except CheckpointError:
            raise
        except Exception as error:
            if received is None and self._exchange.is_coordinator:
                if outcome[:1] == b"+":
                    outcome = self._failure(error, attempt)
                round_.announce("commit", outcome)
            return received or round_.receive("commit"), error
        return received, None


def _shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"
