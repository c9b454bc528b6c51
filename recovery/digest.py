"""Digests of stored chunks, written ``xxh3_128:<32 hexadecimal digits>``.

Guarantees: any accidental change of a chunk (bit flips, truncation, swapped or stale blocks)
changes its digest except with probability about 2^-128; 21 GB/s on one thread, so that digesting
while writing costs less than a copy. Does not resist someone who forges chunks on purpose: XXH3 is
no cryptographic hash. Anyone may call it; torch-free.
"""

from __future__ import annotations

import re

import xxhash

Buffer = bytes | bytearray | memoryview

ALGORITHM = "xxh3_128"
_DIGEST = re.compile(rf"{ALGORITHM}:[0-9a-f]{{32}}")


class Digest:
    """Digests bytes that arrive in pieces; how they are cut makes no difference."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, data: Buffer) -> None:
        self._hash.update(data)

    def text(self) -> str:
        """The digest of everything so far."""
        return f"{ALGORITHM}:{self._hash.hexdigest()}"


def digest(data: Buffer) -> str:
    """The digest of ``data``, which may be bytes or any contiguous buffer."""
    return f"{ALGORITHM}:{xxhash.xxh3_128_hexdigest(data)}"


def is_digest(text: object) -> bool:
    """Whether ``text`` is written as a digest that this version can check."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None
