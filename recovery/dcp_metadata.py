"""What `torch.distributed.checkpoint` (DCP) knows of a checkpoint, in terms of our manifest.

DCP keeps its `Metadata` as a pickle; here it is made from the manifest, so nothing that is read can
execute code. Tensors are in the manifest already. Values that are no tensors lie in the object file
of the rank that DCP chose, under ``items``; the manifest's ``writer`` says which rank that is, and
holds DCP's ``planner_data`` (from which nested dictionary a flattened name came).

Guarantees: every value comes back as `seatrial.recovery.plain` promises, or is refused on saving.
Does not: read or write files. Called by the DCP writer and reader.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from . import plain
from .errors import ManifestError
from .layout import torch_dtype
from .manifest import Manifest, TensorEntry

__all__ = ["Items", "as_torch_file", "dump_items", "items_of", "load_items", "metadata_of"]

LABEL = "torch.distributed.checkpoint"
"""The key of the manifest's ``writer`` under which `Items` are."""


@dataclass(frozen=True, kw_only=True)
class Items:
    """Which rank stored each value that is no tensor, and the planner's own data."""

    ranks: Mapping[str, int]
    planner_data: object

    def label(self) -> dict[str, object]:
        """For the manifest's ``writer``."""
        return {LABEL: {"items": dict(self.ranks), "planner_data": self.planner_data}}


def items_of(manifest: Manifest) -> Items:
    """The items of ``manifest``; none for a checkpoint that `CheckpointStore` saved.

    Raises:
        ManifestError: the manifest says something else than `Items.label`.
    """
    label = manifest.writer.get(LABEL)
    if label is None:
        return Items(ranks={}, planner_data=None)
    ranks = label.get("items") if isinstance(label, dict) else None
    if not isinstance(ranks, dict) or not all(
        isinstance(name, str) and type(rank) is int and 0 <= rank < manifest.world_size
        for name, rank in ranks.items()
    ):
        raise ManifestError(f"the manifest's {LABEL!r} does not say which rank stored which value")
    assert isinstance(label, dict)
    both = ranks.keys() & {entry.name for entry in manifest.tensors}
    if both:
        raise ManifestError(f"the manifest has {sorted(both)} both as tensors and as other values")
    return Items(ranks=ranks, planner_data=label.get("planner_data"))


def metadata_of(manifest: Manifest) -> Metadata:
    """DCP's view of ``manifest``; raises `ManifestError` or `StateError` (unknown dtype)."""
    items = items_of(manifest)
    stored: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        entry.name: _tensor_metadata(entry) for entry in manifest.tensors
    }
    stored |= {name: BytesStorageMetadata() for name in items.ranks}
    return Metadata(state_dict_metadata=stored, planner_data=items.planner_data)


def _tensor_metadata(entry: TensorEntry) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=torch_dtype(entry.dtype)),
        size=torch.Size(entry.shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
            for chunk in entry.chunks
        ],
    )


def dump_items(items: Mapping[str, object]) -> bytes:
    """The content of an object file; raises `StateError` that names what is not plain data."""
    values = plain.dumps(dict(items), name="state_dict")
    return b'{"shared":{},"rank":{},"items":' + values + b"}"


def load_items(content: bytes, file: str) -> Mapping[str, object]:
    """The values in the object file that `dump_items` made; raises `ManifestError`."""
    fields = plain.loads(content)
    items = fields.get("items") if isinstance(fields, dict) else None
    if not isinstance(items, dict):
        raise ManifestError(f"{file} does not hold values of a state_dict")
    return items


def as_torch_file(value: object) -> io.BytesIO:
    """``value`` in the form that a `LoadPlanner` expects, which reads it with `torch.load`.

    Made in memory from verified plain data: no stored byte reaches the unpickler.
    """
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream
