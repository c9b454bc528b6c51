"""A copy of the tensors that a rank stores, in memory that is used again by the next save.

Guarantees: when `Staging.copy` returns, the copy is complete and shares nothing with the live
tensors, so whatever happens to those does not reach it. The memory is allocated once, and again
only when more is needed; where a tensor is on a CUDA device it is pinned.

Does not: copy what other ranks store (each distinct part is copied once in the whole job), or give
memory back while the store lives. The copies are valid until the next call. Called by the store.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .layout import Part, as_carrier

__all__ = ["Staging"]

_ALIGNMENT_BYTES = 64


class Staging:
    """The memory of one rank."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def size_bytes(self) -> int:
        return self._buffer.numel()

    def copy(self, parts: Sequence[Part]) -> list[Part]:
        """Contiguous copies of ``parts`` in CPU memory."""
        starts, end = [], 0
        for part in parts:
            starts.append(end)
            length = part.region.size_bytes
            end += length + -length % _ALIGNMENT_BYTES
        devices = {part.tensor.device for part in parts if part.tensor.device.type == "cuda"}
        self._reserve(end, pinned=bool(devices))
        copies = [
            Part(part.region, self._copied(part, start))
            for part, start in zip(parts, starts, strict=True)
        ]
        for device in devices:
            torch.cuda.synchronize(device)
        return copies

    def _reserve(self, size_bytes: int, *, pinned: bool) -> None:
        if self.size_bytes < size_bytes or (pinned and not self._buffer.is_pinned()):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # never two at a time
            self._buffer = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)

    def _copied(self, part: Part, start: int) -> torch.Tensor:
        tensor, length = part.tensor, part.region.size_bytes
        held = self._buffer[start : start + length].view(tensor.dtype).view(tensor.shape)
        if tensor.is_conj() or tensor.is_neg():
            held.copy_(tensor)
        else:
            # As integers: bit by bit, and for dtypes that torch cannot copy by value.
            as_carrier(held).copy_(as_carrier(tensor), non_blocking=True)
        return held
