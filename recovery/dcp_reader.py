"""`SeatrialReader`: `torch.distributed.checkpoint.load` from a verified checkpoint.

Guarantees: only published steps are loaded; every byte that is used was checked against its digest,
also where a rank needs a part of a chunk only; DCP's `Metadata` is made from the manifest and no
stored byte reaches an unpickler; ranks that see different checkpoints fail together, before
anything is overwritten; dtypes are equal, nothing is cast.

Does not: fall back to an older step by itself (DCP has no way to do so on all ranks), mark the
step as verified, or set damage aside: `CheckpointStore` does. After an error while reading the
state may hold anything. DCP raises its own `CheckpointException`, in which ``failures`` has each
failed rank's error of `seatrial.recovery.errors`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from .dcp_metadata import as_torch_file, items_of, load_items, metadata_of
from .digest import digest
from .directory import CheckpointDirectory, PublishedManifest
from .errors import CheckpointError, MismatchError, NoValidCheckpointError
from .files import read_file, reading
from .layout import Part, Region, dtype_name
from .manifest import Manifest, checked_step
from .probe import around
from .reader import mismatches, read_parts
from .storage import absolute

__all__ = ["SeatrialReader"]


@dataclass(frozen=True)
class _Source:
    """What a rank is about to read; equal on all ranks."""

    step: int
    manifest: str


class SeatrialReader(StorageReader):
    """For ``dcp.load(state_dict, storage_reader=SeatrialReader(directory))``.

    Args:
        directory: of the checkpoints, as given to `SeatrialWriter` or `CheckpointStore`.
        step: the step to load; None for the newest that is published.
        storage_options, single_writer: for URLs; see `CheckpointStore`.

    Tensors of a checkpoint that `CheckpointStore` saved are found under their names in the
    manifest, such as ``model/0.weight``; its other values are for `CheckpointStore.restore` alone.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        step: int | None = None,
        storage_options: Mapping[str, object] | None = None,
        single_writer: bool = False,
    ) -> None:
        self._directory = CheckpointDirectory.at(
            absolute(directory), storage_options=storage_options, single_writer=single_writer
        )
        self._step = None if step is None else checked_step(step)
        self._published: PublishedManifest | None = None

    @property
    def manifest(self) -> Manifest:
        """The manifest of the step that was loaded; raises `CheckpointError` before a load."""
        if self._published is None:
            raise CheckpointError("nothing was loaded yet, so there is no manifest")
        return self._published.manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            refuse_checkpoint_id(checkpoint_id, "SeatrialReader")
        self._published = None

    # Not `**kwargs`: DCP would take it for a reader of rank-local metadata, and one rank on which
    # the first call fails would leave the collectives of the others.
    def read_metadata(self, *args: Any, **_options: Any) -> Metadata:
        """The checkpoint's metadata, made from its manifest.

        Raises:
            NoValidCheckpointError: nothing is published.
            CheckpointError: the step is not published or its manifest is damaged.
        """
        step = self._chosen()
        path = self._directory.storage.manifest_path(step)
        try:
            with around("restore/manifest/read", step=step, file=path):
                self._published = self._directory.read_manifest(step)
            return metadata_of(self._published.manifest)
        except CheckpointError as error:
            raise type(error)(
                f"step {step} cannot be loaded: {error}.{self._advice(step)}"
            ) from error

    def _chosen(self) -> int:
        published = self._directory.storage.published()
        if self._step is not None and self._step not in published:
            raise CheckpointError(
                f"step {self._step} is not published in {self._directory.location}; "
                f"published are {published}"
            )
        if not published:
            raise NoValidCheckpointError(f"nothing is published in {self._directory.location}")
        return published[-1] if self._step is None else self._step

    def _advice(self, step: int) -> str:
        older = [each for each in self._directory.storage.published() if each < step]
        if not older:
            return " No older step is published"
        return f" Older steps are {older}; to load one, pass step= to SeatrialReader"

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        assert self._published is not None
        source = _Source(self.manifest.step, digest(self._published.content))
        return replace(plan, storage_data=source)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        sources = [plan.storage_data for plan in plans]
        if len(set(sources)) > 1:
            steps = {rank: source.step for rank, source in enumerate(sources)}
            raise CheckpointError(
                f"the ranks see different checkpoints in {self._directory.location}: steps {steps} "
                "by rank; pass step=, and check that all see the same file system and no other "
                "job saves there"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors and values.

        Raises:
            DamagedCheckpointError: stored bytes are missing or differ from their digest.
            MismatchError: a tensor has another dtype; nothing was overwritten on this rank.
        """
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        try:
            self._read_tensors(tensors, planner)
            self._read_values(values, planner)
        except CheckpointError as error:
            if isinstance(error, MismatchError):
                raise
            step = self.manifest.step
            raise type(error)(
                f"step {step} cannot be loaded: {error}.{self._advice(step)}"
            ) from error
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_tensors(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        manifest = self.manifest
        shapes = {entry.name: entry.shape for entry in manifest.tensors}
        parts, resolved = [], []
        for item in items:
            tensor = planner.resolve_tensor(item)
            resolved.append(tensor)
            parts.append(_part(item, tensor.detach(), shapes))
        different = mismatches(manifest, parts)
        if different:
            raise MismatchError(
                f"the state_dict does not fit step {manifest.step}: {'; '.join(different)}. "
                "Nothing is cast: load into the stored dtype and convert afterwards"
            )
        read_parts(self._directory.files(manifest), manifest, parts)
        for item, tensor in zip(items, resolved, strict=True):
            planner.commit_tensor(item, tensor)

    def _read_values(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        manifest = self.manifest
        files = self._directory.files(manifest)
        ranks = items_of(manifest).ranks
        held: dict[int, Any] = {}
        for item in items:
            name = item.storage_index.fqn
            if name not in ranks:
                raise MismatchError(f"step {manifest.step} has no value {name!r}")
            rank = ranks[name]
            entry = manifest.objects[rank]
            if rank not in held:
                path = files.path(entry.name)
                with around("restore/shard/read", step=manifest.step, file=path):
                    content = reading(files, entry.name, partial(read_file, files, entry))
                held[rank] = load_items(content, entry.name)
            if name not in held[rank]:
                raise CheckpointError(f"{entry.name} lacks the value {name!r} of the manifest")
            planner.load_bytes(item, as_torch_file(held[rank][name]))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: a path alone does not say which step, so DCP shall not choose this reader."""
        return False


def refuse_checkpoint_id(checkpoint_id: str | os.PathLike[str], kind: str) -> NoReturn:
    """Raise `CheckpointError`: a ``checkpoint_id`` would be a second, conflicting place."""
    raise CheckpointError(
        f"checkpoint_id={str(checkpoint_id)!r} was passed beside a {kind}, which has its directory "
        f"and step already; leave checkpoint_id out and pass {kind}(directory, step=...)"
    )


def _part(item: ReadItem, tensor: Any, shapes: dict[str, tuple[int, ...]]) -> Part:
    """``tensor`` as the region of the stored tensor that ``item`` asks for."""
    name = item.storage_index.fqn
    if name not in shapes:
        raise MismatchError(f"the checkpoint has no tensor {name!r}")
    start = item.storage_index.offset or (0,) * len(shapes[name])
    offsets = tuple(a + b for a, b in zip(start, item.storage_offsets, strict=True))
    if tuple(tensor.shape) != tuple(item.lengths):
        raise MismatchError(
            f"{name!r} shall be read as {tuple(item.lengths)} into a tensor of "
            f"{tuple(tensor.shape)}"
        )
    region = Region(name, dtype_name(tensor.dtype), shapes[name], offsets, tuple(item.lengths))
    return Part(region, tensor)
