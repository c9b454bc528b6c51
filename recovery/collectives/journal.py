"""What one rank called since the ranks last agreed, group by group, and its rolling fingerprint.

Guarantees: equal sequences of calls have equal fingerprints on every rank, and other sequences have
others but for a chance of one in 2^64; an empty one has 0. Memory is bounded: the oldest calls of a
long sequence are kept as a fingerprint alone. Torch-free.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from .callsite import CallSite

KEPT = 16384
_FACTOR = 0x9E3779B97F4A7C15
UINT64 = (1 << 64) - 1


def hash64(text: str) -> int:
    """The same odd number for the same text in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") | 1


@dataclass(eq=False)
class Signature:
    """What is the same in many calls of one group: one object for each, with a number of its own.

    ``what`` has the operation, shapes, dtypes, reduction and root as `encode` puts them.
    """

    index: int
    operation: str
    shapes: str
    dtypes: str
    extra: str
    site: CallSite
    size_bytes: int
    is_message: bool = False
    code: int = 0

    def __post_init__(self) -> None:
        self.stands_for(str(self.site))

    def stands_for(self, site: str) -> None:
        """Count as a call from ``site``: what other ranks call from there corresponds to it.

        A message is the same for who sends it and who receives it, wherever they do.
        """
        words = (self.shapes, self.dtypes, self.extra)
        self.code = hash64("\0".join(words if self.is_message else (self.operation, *words, site)))

    def encode(self) -> tuple[str, str, str, str, str]:
        return self.operation, self.shapes, self.dtypes, self.extra, str(self.site)


@dataclass(eq=False, slots=True)
class Stream:
    """The calls of one rank in one group, or to one peer in it.

    ``count`` counts them all; ``recent`` are those since the last agreement, but for ``folded``
    older ones, which ``base`` stands for. ``thread`` made the newest. Whoever adds one, see
    `calls`, makes it fold before there are more than `KEPT`.
    """

    count: int = 0
    recent: list[Signature] = field(default_factory=list)
    folded: int = 0
    base: int = 0
    thread: int = 0
    taken: int = 0

    def fold(self) -> None:
        """Keep the recent calls as a fingerprint alone."""
        self.base = self.fingerprint()
        self.folded += len(self.recent)
        self.recent = []

    def fingerprint(self) -> int:
        """Of all calls since the last agreement, below 2^64; ``taken`` recent ones are in it."""
        value = self.base
        # Another thread may add calls meanwhile.
        self.taken = len(self.recent)
        for signature in self.recent[: self.taken]:
            value = (value * _FACTOR + signature.code) & UINT64
        return value

    def agreed(self, calls: int) -> None:
        """The ranks have found the first ``calls`` recent ones to be the same."""
        del self.recent[:calls]
        self.base = self.folded = 0
