"""`SeatrialWriter`: `torch.distributed.checkpoint.save` and `async_save` to a manifest store.

DCP plans which rank writes what, and carries messages and errors between the ranks; the files, the
digests and the commit are those of `CheckpointStore`, and so is the format.

Guarantees: the step exists exactly when `dcp.save` returned or was about to, and then all its bytes
are durable; an error on any rank publishes nothing and is raised on every rank; a tensor that
several names share (tied weights) is stored once under `DefaultSavePlanner`; nothing is pickled
into the files: what is no tensor is stored as `seatrial.recovery.plain` does, or refused by name.

Does not: delete anything, not even a failed attempt's files (see `CheckpointStore.prune`); support
planners that cache plans, or `use_collectives=False`, whose ranks do not hear of each other. DCP
raises its own `CheckpointException`, in which ``failures`` has each failed rank's error of
`seatrial.recovery.errors`. What a planner makes for saving (a cast copy) is held until all of this
rank's tensors are written.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from .dcp_metadata import Items, dump_items
from .dcp_reader import refuse_checkpoint_id
from .dcp_ties import canonical_names
from .digest import DEFAULT, require_algorithm
from .directory import CheckpointDirectory
from .errors import ManifestError, SaveError, StateError
from .layout import CHUNK_BYTES, Part, Region, local_parts, split
from .manifest import Chunk, FileEntry, Manifest, ShardEntry, TensorEntry, checked_step
from .probe import around
from .storage import Attempt, absolute, collected
from .writer import write_object_file, write_shard_file

__all__ = ["SeatrialWriter"]


@dataclass(frozen=True, kw_only=True)
class _Order:
    """What the coordinator tells a rank: where to write, and as which rank."""

    attempt: str
    rank: int


@dataclass(frozen=True, kw_only=True)
class _Report:
    """What a rank wrote. ``ties``: regions not written, as they are those of another name."""

    shard: ShardEntry
    objects: FileEntry
    chunks: Sequence[tuple[Region, Chunk]]
    ties: Sequence[tuple[Region, str]]
    items: Sequence[str]


@dataclass
class _Work:
    """What a plan asks of this rank."""

    parts: list[Part] = field(default_factory=list)
    ties: list[tuple[Region, str]] = field(default_factory=list)
    items: dict[str, object] = field(default_factory=dict)


class SeatrialWriter(StorageWriter):
    """For ``dcp.save(state_dict, storage_writer=SeatrialWriter(directory, step=10))``.

    Args:
        directory: path or URL of the checkpoints of a run; all ranks see it.
        step: what is saved; a writer saves one step.
        parent_step, topology, writer, run: kept in the manifest; see `Manifest`.
        digest: algorithm of the digests that are written, ``xxh3_128`` or ``blake3``; all are read.
        storage_options, single_writer: for URLs; see `CheckpointStore`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        step: int,
        parent_step: int | None = None,
        topology: str = "",
        writer: Mapping[str, object] | None = None,
        run: Mapping[str, object] | None = None,
        digest: str = DEFAULT,
        storage_options: Mapping[str, object] | None = None,
        single_writer: bool = False,
    ) -> None:
        self._step = checked_step(step)
        self._algorithm = require_algorithm(digest)
        self._directory = CheckpointDirectory.at(
            absolute(directory), storage_options=storage_options, single_writer=single_writer
        )
        self._parent_step = parent_step
        self._topology = topology
        self._writer = dict(writer or {})
        self._run = dict(run or {})
        self._attempt: Attempt | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            refuse_checkpoint_id(checkpoint_id, "SeatrialWriter")
        self._end_attempt()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise SaveError(
                "use_collectives=False saves every rank by itself, so nobody could tell when all "
                "are durable; leave it out to save with SeatrialWriter"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        _refuse_cached(plan)
        return replace(plan, storage_data=self._step)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: make the attempt's directory, and tell every rank of it."""
        for plan in plans:
            _refuse_cached(plan)
        steps = {rank: plan.storage_data for rank, plan in enumerate(plans)}
        if set(steps.values()) != {self._step}:
            raise SaveError(f"the ranks save different steps: {steps} by rank")
        self._end_attempt()
        self._attempt = self._directory.storage.begin(self._step)
        return [
            replace(plan, storage_data=_Order(attempt=self._attempt.name, rank=rank))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; durable when it returns.

        Raises:
            StateError: something in the state_dict cannot be stored; the message names it.
            SaveError: another attempt has taken over.
            OSError: as the file system says.
        """
        order = plan.storage_data
        if not isinstance(order, _Order):
            raise SaveError(
                f"{type(planner).__name__} lost the storage_data of its plan, which says where to "
                "write; keep it in finish_plan"
            )
        work = _work(plan, planner)
        objects = dump_items(work.items)
        files = self._directory.storage.files(self._step, order.attempt)
        base = f"rank-{order.rank:05d}"
        try:
            shard, chunks = write_shard_file(
                files,
                f"{base}.safetensors",
                _with_unique_names(work.parts),
                step=self._step,
                chunk_bytes=CHUNK_BYTES,
                algorithm=self._algorithm,
            )
            entry = write_object_file(
                files, f"{base}.json", objects, step=self._step, algorithm=self._algorithm
            )
            if files.fsyncs:
                with around("checkpoint/directory/fsync", step=self._step, file=files.path()):
                    files.fsync()
        except FileNotFoundError as error:
            raise collected(files.path()) from error
        regions = [piece for part in work.parts for piece in split(part.region, CHUNK_BYTES)]
        report = _Report(
            shard=shard,
            objects=entry,
            chunks=list(zip(regions, chunks, strict=True)),
            ties=work.ties,
            items=list(work.items),
        )
        future: Future[list[WriteResult]] = Future()
        size = shard.size + entry.size
        future.set_result([WriteResult(MetadataIndex(shard.name), size, report)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when all ranks are durable: publish.

        Raises:
            AlreadyPublishedError: another attempt published the step first.
            SaveError: the ranks' parts do not add up, or another attempt has taken over.
        """
        assert self._attempt is not None
        try:
            reports = [result.storage_data for (result,) in results]
            manifest = self._manifest(self._attempt.name, metadata, reports)
            try:
                content = manifest.to_bytes()
            except ManifestError as error:
                raise SaveError(f"step {self._step} was not saved: {error}") from error
            self._attempt.publish(content, manifest.file_sizes)
        finally:
            self._end_attempt()

    def _manifest(self, attempt: str, metadata: Metadata, reports: Sequence[_Report]) -> Manifest:
        items = Items(
            ranks={name: rank for rank, report in enumerate(reports) for name in report.items},
            planner_data=metadata.planner_data,
        )
        return Manifest(
            step=self._step,
            parent_step=self._parent_step,
            attempt=attempt,
            topology=self._topology,
            world_size=len(reports),
            writer=self._writer | items.label(),
            run=self._run,
            shards=tuple(report.shard for report in reports),
            objects=tuple(report.objects for report in reports),
            tensors=_tensors(reports),
        )

    def _end_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: a path alone does not say which step, so DCP shall not choose this writer."""
        return False


def _refuse_cached(plan: SavePlan) -> None:
    # A cached final plan has the storage_data of the attempt in which it was cached.
    if not plan.usable:
        raise SaveError(
            "the planner reuses a cached plan, which names the directory of an earlier attempt; "
            "save with enable_plan_caching=False"
        )


def _work(plan: SavePlan, planner: SavePlanner) -> _Work:
    """The tensors to write, widest elements first, so that each is aligned in the file."""
    work = _Work()
    canonical = canonical_names(planner)
    for item in plan.items:
        name = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            work.items[name] = _value(item, planner)
            continue
        part = _part(item, planner)
        if part is None:
            continue
        if canonical.get(name, name) == name:
            work.parts.append(part)
        else:
            pieces = split(part.region, CHUNK_BYTES)
            work.ties += [(piece, canonical[name]) for piece in pieces]
    work.parts.sort(key=lambda part: -part.tensor.dtype.itemsize)
    return work


def _part(item: WriteItem, planner: SavePlanner) -> Part | None:
    """What ``item`` writes; None for a rank's empty piece of a tensor that is not empty."""
    data, name = item.tensor_data, item.index.fqn
    assert data is not None
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor):
        raise StateError(f"{name!r} was planned as a tensor and is a {type(tensor).__name__}")
    shape, sizes = tuple(data.size), tuple(data.chunk.sizes)
    if math.prod(sizes) == 0 and math.prod(shape) != 0:
        return None
    # Refuses what has no plain bytes; whole, because DCP has taken a DTensor apart.
    (whole,) = local_parts({name: tensor})
    if whole.region.sizes != sizes:
        raise StateError(f"{name!r} was planned as {sizes} and is {whole.region.sizes}")
    region = replace(whole.region, shape=shape, offsets=tuple(data.chunk.offsets))
    return Part(region, whole.tensor)


def _value(item: WriteItem, planner: SavePlanner) -> object:
    """The object that a planner would pickle."""
    if isinstance(planner, DefaultSavePlanner):
        kind = type(planner)
        if (kind.resolve_data, kind.transform_object) == (
            DefaultSavePlanner.resolve_data,
            DefaultSavePlanner.transform_object,
        ):
            return planner.lookup_object(item.index)
    stream: Any = planner.resolve_data(item)
    try:
        stream.seek(0)
        return torch.load(stream, weights_only=True)
    except Exception as error:
        raise StateError(
            f"{type(planner).__name__} encodes {item.index.fqn!r} in its own way, which could not "
            f"be read without executing code ({error}); let it return what torch.save writes of "
            "plain data"
        ) from error


def _with_unique_names(parts: Sequence[Part]) -> list[Part]:
    """A rank may write several pieces of a tensor, and a safetensors header has a name once."""
    seen: set[str] = set()
    named = []
    for part in parts:
        name = part.region.name
        while name in seen:
            name += f"@{list(part.region.offsets)}"
        seen.add(name)
        named.append(Part(replace(part.region, name=name), part.tensor))
    return named


def _tensors(reports: Sequence[_Report]) -> tuple[TensorEntry, ...]:
    written = {(r.name, r.offsets): c for report in reports for r, c in report.chunks}
    tied = {(r.name, r.offsets): name for report in reports for r, name in report.ties}
    chunks: dict[str, tuple[Region, list[Chunk]]] = {}
    for report in reports:
        for region, chunk in report.chunks:
            _add(chunks, region, chunk)
        for region, name in report.ties:
            key = (name, region.offsets)
            while key not in written and key in tied:  # towards smaller names, so it ends
                key = (tied[key], region.offsets)
            if key not in written:
                raise SaveError(
                    f"{region.name!r} shares its memory with {key[0]!r}, which no rank has written"
                )
            _add(chunks, region, written[key])
    return tuple(
        TensorEntry(name=name, dtype=region.dtype, shape=region.shape, chunks=tuple(held))
        for name, (region, held) in sorted(chunks.items())
    )


def _add(chunks: dict[str, tuple[Region, list[Chunk]]], region: Region, chunk: Chunk) -> None:
    first, held = chunks.setdefault(region.name, (region, []))
    if (first.dtype, first.shape) != (region.dtype, region.shape):
        raise SaveError(
            f"tensor {region.name!r} is {first.dtype}{list(first.shape)} on one rank and "
            f"{region.dtype}{list(region.shape)} on another; the ranks must agree"
        )
    if region.elements or not held:
        held.append(chunk)
