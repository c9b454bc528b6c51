"""Whether the ranks that should hold equal copies of a tensor do: silent corruption, by name.

Guarantees: parameters and optimizer state of which several ranks hold the same region, by data
parallelism or any other, are compared bitwise before a checkpoint is published. Of three copies or
more the odd ones are named; of two that differ both, for there is no telling which is wrong.

Does not: see a wrong value that all copies have alike, as when a rank's gradient was wrong before
it was reduced; or look at buffers, which a rank may rightly have of its own, such as statistics.

One pass over the rank's state for each save, and 16 bytes for each of its tensors in one message.
Costs nothing between saves. Copies that are computed by each rank, not sent, are equal only where
kernels are deterministic: leave such tensors out by ``only``.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .checkpointable import Checkpointable
from .errors import ReplicaMismatchError
from .fingerprint import Fingerprinter

__all__ = ["Replicas"]

_MASK = (1 << 64) - 1
_NAMED = 3


class Replicas:
    """A `seatrial.recovery.guards.Guard` of one rank.

    ``only(name, tensor)`` says which tensors are compared, by their names in the checkpoint. By
    default these are the parameters and what belongs to the optimizer. ``fingerprinter`` is one
    that the program has for the same state, whose memory then serves both.
    """

    name = "replicas"

    def __init__(
        self,
        *,
        rank: int,
        only: Callable[[str, torch.Tensor], bool] | None = None,
        fingerprinter: Fingerprinter | None = None,
    ) -> None:
        self._shares = fingerprinter is not None
        self._fingerprinter = fingerprinter or Fingerprinter(rank=rank)
        self._only = only or _is_trained
        self._told: str | None = None
        self._digest = ""
        # The coordinator's side: the layout of each rank by its digest.
        self._layouts: dict[str, list[tuple[str, str]]] = {}

    def testify(self, state: Checkpointable) -> Any:
        """The layout of this rank's tensors, if it changed, and a hash of each."""
        tensors = state.tensors()
        chosen = {name: tensor for name, tensor in tensors.items() if self._only(name, tensor)}
        # A fingerprinter keeps the memory of one set of tensors: that of whoever shares it.
        found = self._fingerprinter.tensors(tensors if self._shares else chosen)
        parts = {name: found[name] for name in chosen}
        layout = [(name, self._fingerprinter.region(name)) for name in parts]
        digest = hashlib.blake2b(json.dumps(layout).encode(), digest_size=16).hexdigest()
        changed = digest != self._told
        self._told, self._digest = None, digest  # told once all have agreed
        hashes = [f"{a & _MASK:016x}{b & _MASK:016x}" for a, b, *_ in parts.values()]
        return [digest, layout if changed else None, hashes]

    def judge(self, testimonies: Sequence[Any]) -> Any:
        """What is wrong, as a sentence; empty if nothing is."""
        for digest, layout, _ in testimonies:
            if layout is not None:
                self._layouts[digest] = [(name, region) for name, region in layout]
        copies: dict[tuple[str, str], dict[int, str]] = {}
        for rank, (digest, _, hashes) in enumerate(testimonies):
            for held, value in zip(self._layouts[digest], hashes, strict=True):
                copies.setdefault(held, {})[rank] = value
        wrong = {held: values for held, values in copies.items() if len(set(values.values())) > 1}
        return _sentence(wrong) if wrong else ""

    def conclude(self, answer: Any) -> None:
        """
        Raises:
            ReplicaMismatchError: the answer says that copies differ.
        """
        if answer:
            raise ReplicaMismatchError(answer)
        self._told = self._digest


def _is_trained(name: str, tensor: torch.Tensor) -> bool:
    return name.startswith("optimizer") or isinstance(tensor, torch.nn.Parameter)


def _sentence(wrong: dict[tuple[str, str], dict[int, str]]) -> str:
    blamed: Counter[int] = Counter()
    undecided: set[int] = set()
    for values in wrong.values():
        counts = Counter(values.values()).most_common()
        if counts[0][1] > counts[1][1]:
            blamed.update(rank for rank, value in values.items() if value != counts[0][0])
        else:
            undecided |= values.keys()
    names = list(dict.fromkeys(name for name, _ in wrong))
    shown = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" * (len(names) > _NAMED))
    if blamed:
        ranks = ", ".join(str(rank) for rank in sorted(blamed))
        return f"the copies of {shown} on rank {ranks} differ from those of the other ranks"
    ranks = ", ".join(str(rank) for rank in sorted(undecided))
    return (
        f"the copies of {shown} on ranks {ranks} differ, and there is no majority to tell which of "
        "them is wrong"
    )
