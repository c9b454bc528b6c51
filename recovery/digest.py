"""Digests of stored chunks, written ``<algorithm>:<hexadecimal digits>``.

Guarantees: any accidental change of a chunk (bit flips, truncation, swapped or stale blocks)
changes its digest except with probability about 2^-128. ``xxh3_128``, the default, costs less than
a copy (21 GB/s on one thread) and does not resist someone who forges chunks on purpose: it is no
cryptographic hash. ``blake3`` (4.5 GB/s; the extra ``seatrial[blake3]``) does: whoever knows the
digest of a manifest from elsewhere knows that nothing in the checkpoint was changed. Both release
the GIL, so that several threads digest at once.

Does not: sign anything. Who can write the manifest can write new digests. Anyone may call it;
torch-free.
"""

from __future__ import annotations

import re
from typing import Protocol

import xxhash

from .errors import CheckpointError

__all__ = ["ALGORITHMS", "Digest", "algorithm_of", "digest", "is_digest", "require_algorithm"]

Buffer = bytes | bytearray | memoryview

DEFAULT = "xxh3_128"
ALGORITHMS = {"xxh3_128": 32, "blake3": 64}
"""Names of the algorithms and the number of their hexadecimal digits."""

_DIGEST = re.compile("|".join(f"{name}:[0-9a-f]{{{n}}}" for name, n in ALGORITHMS.items()))


class _Hash(Protocol):
    def update(self, data: Buffer, /) -> object: ...
    def hexdigest(self) -> str: ...


class Digest:
    """Digests bytes that arrive in pieces; how they are cut makes no difference.

    Raises:
        CheckpointError: the algorithm's package is not installed.
    """

    def __init__(self, algorithm: str = DEFAULT) -> None:
        self._algorithm = algorithm
        self._hash: _Hash = xxhash.xxh3_128() if algorithm == DEFAULT else _blake3()

    def update(self, data: Buffer) -> None:
        self._hash.update(data)

    def text(self) -> str:
        """The digest of everything so far."""
        return f"{self._algorithm}:{self._hash.hexdigest()}"


def digest(data: Buffer, algorithm: str = DEFAULT) -> str:
    """The digest of ``data``, which may be bytes or any contiguous buffer."""
    if algorithm == DEFAULT:
        return f"{DEFAULT}:{xxhash.xxh3_128_hexdigest(data)}"
    running = Digest(algorithm)
    running.update(data)
    return running.text()


def is_digest(text: object) -> bool:
    """Whether ``text`` is written as a digest of a known algorithm."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def algorithm_of(text: str) -> str:
    """The algorithm of a digest."""
    return text.partition(":")[0]


def require_algorithm(name: str) -> str:
    """``name``, if digests can be made by it here.

    Raises:
        ValueError: there is no such algorithm.
        CheckpointError: its package is not installed.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"digest is {name!r}; it must be one of {', '.join(ALGORITHMS)}")
    Digest(name)
    return name


def _blake3() -> _Hash:
    try:
        from blake3 import blake3
    except ImportError as error:
        raise CheckpointError(
            "digests by BLAKE3 need the package 'blake3', which is not installed here: "
            "pip install 'seatrial[blake3]'"
        ) from error
    running: _Hash = blake3()
    return running
