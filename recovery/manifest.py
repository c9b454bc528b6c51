"""The manifest: everything a checkpoint holds, and the commit that makes it exist.

Guarantees: `Manifest.to_bytes` and `Manifest.from_bytes` are inverse; the bytes are one JSON object
whose first member is the digest of the rest, so any truncation or changed bit is recognised and
raises `ManifestError`, as does whatever breaks the schema or contradicts itself, however it was
sealed: see `seatrial.recovery.references`. File names are single path components: nothing outside
the attempt's directory can be named. Nothing that is decoded executes code.

Does not: read shards, look at the file system, or know tensors beyond their names, dtypes and
shapes. Torch-free; anyone may call it.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from . import plain
from .digest import ALGORITHMS, DEFAULT, algorithm_of, digest, is_digest
from .errors import CheckpointError, ManifestError
from .garbage import collection_paused
from .references import check_references

__all__ = [
    "Chunk",
    "FileEntry",
    "Manifest",
    "ShardEntry",
    "TensorEntry",
    "check_file_name",
    "checked_step",
]

FORMAT = "seatrial-checkpoint"
VERSION = 1
MANIFEST_BYTES_MAX = 256 << 20
_NUMBER_LIMIT = 1 << 63

_HEAD = b'{"digest":"%s","manifest":'
_ALGORITHM = re.compile(rb'\{"digest":"(%s):' % "|".join(ALGORITHMS).encode())
_TAIL = b"}\n"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_ATTEMPT = re.compile(r"attempt-[A-Za-z0-9_]{1,64}")
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A rectangular part of a tensor, stored as ``length`` bytes at ``offset`` of ``file``.

    ``offsets`` and ``sizes`` are in elements of the global tensor; ``offset`` and ``length`` in
    bytes. Elements lie in row-major order, little-endian.
    """

    file: str
    offset: int
    length: int
    digest: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A logical tensor: ``dtype`` as torch prints it without the module, global ``shape``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """A shard file of ``size`` bytes; ``digest`` is that of its ``header`` leading bytes.

    The rest of the file is chunks, each with a digest of its own.
    """

    name: str
    size: int
    header: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A file that is digested as a whole, ``size`` in bytes."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One checkpoint. ``shards`` and ``objects`` are in order of the ranks that wrote them.

    ``attempt`` is the name of the files' directory, beside the manifest; ``writer`` and ``run`` are
    free plain data about who saved and what was running.
    """

    step: int
    parent_step: int | None
    attempt: str
    topology: str
    world_size: int
    tensors: tuple[TensorEntry, ...]
    shards: tuple[ShardEntry, ...]
    objects: tuple[FileEntry, ...]
    writer: Mapping[str, object] = field(default_factory=dict)
    run: Mapping[str, object] = field(default_factory=dict)

    @property
    def file_sizes(self) -> dict[str, int]:
        """Every file that is named, and its size in bytes."""
        sizes = {entry.name: entry.size for entry in self.shards}
        return sizes | {entry.name: entry.size for entry in self.objects}

    @property
    def size_bytes(self) -> int:
        """Bytes of all files that the manifest names."""
        return sum(shard.size for shard in self.shards) + sum(file.size for file in self.objects)

    @property
    def algorithm(self) -> str:
        """Of the digests; see `seatrial.recovery.digest`."""
        return algorithm_of(self.shards[0].digest) if self.shards else DEFAULT

    @collection_paused()
    def to_bytes(self) -> bytes:
        """The file's content.

        Raises:
            StateError: ``writer`` or ``run`` is not plain data.
            ManifestError: the entries contradict each other; `from_bytes` would refuse them.
        """
        check_references(self)
        body = json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "step": self.step,
                "parent_step": self.parent_step,
                "attempt": self.attempt,
                "topology": self.topology,
                "world_size": self.world_size,
                "writer": plain.encode(dict(self.writer), name="writer", arrays=False),
                "run": plain.encode(dict(self.run), name="run", arrays=False),
                "shards": [vars(shard) for shard in self.shards],
                "objects": [vars(file) for file in self.objects],
                "tensors": [
                    {**vars(tensor), "chunks": [vars(chunk) for chunk in tensor.chunks]}
                    for tensor in self.tensors
                ],
            },
            separators=(",", ":"),
            allow_nan=False,
        ).encode()
        content = _sealed(body, self.algorithm)
        if len(content) > MANIFEST_BYTES_MAX:
            raise ManifestError(_too_large(len(content)))
        return content

    @classmethod
    @collection_paused()
    def from_bytes(cls, content: bytes) -> Manifest:
        """Read what `to_bytes` wrote.

        Raises:
            ManifestError: not whole, or against the schema.
            CheckpointError: whole, and of a format version that this release cannot read.
        """
        body = _sealed_body(content)
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"the manifest is not JSON: {error}") from error
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise ManifestError("this JSON is not a seatrial checkpoint manifest")
        if fields.get("version") != VERSION:
            # No damage: falling back to an older checkpoint would silently lose work.
            raise CheckpointError(
                f"the manifest has format version {fields.get('version')!r} and this release "
                f"reads version {VERSION}; use the release that wrote it"
            )
        try:
            manifest = _manifest(fields)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ManifestError(f"the manifest breaks the schema: {error!r}") from error
        check_references(manifest)
        return manifest


def checked_step(step: object) -> int:
    """``step`` as an ``int``, also of NumPy's; raises `ValueError` for what is no step."""
    try:
        if isinstance(step, bool):
            raise TypeError
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(
            f"step is {step!r}, a {type(step).__name__}; a step is a whole number, 0 or more"
        ) from None
    if not 0 <= number < _NUMBER_LIMIT:
        raise ValueError(f"step is {number}; a step is 0 or more, and below 2^63")
    return number


def check_file_name(name: object) -> str:
    """``name`` if it is one plain path component, else `ManifestError`."""
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise ManifestError(
            f"the manifest names the file {name!r}; only plain names of letters, digits, '_', '.' "
            "and '-' inside the attempt's directory are allowed"
        )
    return name


def _sealed(body: bytes, algorithm: str) -> bytes:
    return _HEAD % digest(body, algorithm).encode() + body + _TAIL


def _sealed_body(content: bytes) -> bytes:
    if len(content) > MANIFEST_BYTES_MAX:
        raise ManifestError(_too_large(len(content)))
    found = _ALGORITHM.match(content)
    algorithm = found[1].decode() if found else DEFAULT
    head_bytes = len(_HEAD) - len(b"%s") + len(algorithm) + 1 + ALGORITHMS[algorithm]
    body = content[head_bytes : -len(_TAIL)]
    if content != _sealed(body, algorithm):
        raise ManifestError(
            f"the manifest is not whole: its {len(content)} bytes do not match their digest"
        )
    return body


def _too_large(size_bytes: int) -> str:
    return (
        f"the manifest has {size_bytes} bytes, more than the {MANIFEST_BYTES_MAX} allowed; store "
        "large values as tensors and keep `run` and `writer` small"
    )


def _manifest(fields: Mapping[str, object]) -> Manifest:
    parent = fields["parent_step"]
    attempt = _text(fields["attempt"])
    if not _ATTEMPT.fullmatch(attempt):
        raise ValueError(f"attempt {attempt!r} is not 'attempt-' and letters, digits or '_'")
    return Manifest(
        step=_natural(fields["step"]),
        parent_step=None if parent is None else _natural(parent),
        attempt=attempt,
        topology=_text(fields["topology"]),
        world_size=_natural(fields["world_size"]),
        writer=_free(fields["writer"]),
        run=_free(fields["run"]),
        shards=_each(fields["shards"], _shard),
        objects=_each(fields["objects"], _file),
        tensors=_each(fields["tensors"], _tensor),
    )


def _tensor(fields: Mapping[str, object]) -> TensorEntry:
    return TensorEntry(
        name=_text(fields["name"]),
        dtype=_text(fields["dtype"]),
        shape=_naturals(fields["shape"]),
        chunks=_each(fields["chunks"], _chunk),
    )


def _chunk(fields: Mapping[str, object]) -> Chunk:
    return Chunk(
        file=check_file_name(fields["file"]),
        offset=_natural(fields["offset"]),
        length=_natural(fields["length"]),
        digest=_digest(fields["digest"]),
        offsets=_naturals(fields["offsets"]),
        sizes=_naturals(fields["sizes"]),
    )


def _shard(fields: Mapping[str, object]) -> ShardEntry:
    return ShardEntry(**vars(_file(fields)), header=_natural(fields["header"]))


def _file(fields: Mapping[str, object]) -> FileEntry:
    return FileEntry(
        name=check_file_name(fields["name"]),
        size=_natural(fields["size"]),
        digest=_digest(fields["digest"]),
    )


def _shown(value: object) -> str:
    """``value`` for a message; what is long or nested is named by its type alone."""
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__}"
    return f"{value!r:.80}"


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"text expected, found {_shown(value)}")
    return value


def _natural(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _NUMBER_LIMIT:
        raise TypeError(f"a number from 0 to {_NUMBER_LIMIT - 1} expected, found {_shown(value)}")
    return value


def _naturals(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError(f"a list of numbers expected, found {_shown(value)}")
    return tuple(_natural(item) for item in value)


def _digest(value: object) -> str:
    # A missing digest is damage: nothing is ever read without one.
    if not is_digest(value):
        raise TypeError(f"a digest expected, found {_shown(value)}")
    return str(value)


def _free(value: object) -> dict[str, object]:
    decoded = plain.decode(value, arrays=False)
    if not isinstance(decoded, dict):
        raise TypeError(f"an object expected, found {_shown(value)}")
    return decoded


def _each(value: object, read: Callable[[Mapping[str, object]], _T]) -> tuple[_T, ...]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise TypeError(f"a list of objects expected, found {_shown(value)}")
    return tuple(read(item) for item in value)
