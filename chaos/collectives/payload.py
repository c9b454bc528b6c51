"""Damaging one element of a tensor: a flipped bit, NaN or Inf; the same one for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def damageable(tensors: Sequence[torch.Tensor], how: str) -> list[torch.Tensor]:
    """Those that have an element which can become so: integers are never NaN."""
    return [
        tensor
        for tensor in tensors
        if tensor.numel()
        and (tensor.itemsize in _INTEGERS if how == "bit" else tensor.is_floating_point())
    ]


def damage(tensors: Sequence[torch.Tensor], how: str, chance: random.Random) -> str:
    """Change one element in place; what was done, as half a sentence. Empty if nothing could be.

    A bit flips among the upper ones of the mantissa or the lower ones of the exponent of an element
    that is not 0, so that it is not lost to rounding and does not become NaN.
    """
    candidates = damageable(tensors, how)
    if not candidates:
        return ""
    tensor = candidates[chance.randrange(len(candidates))].detach()
    index = chance.randrange(tensor.numel())
    place = tuple(int(each) for each in torch.unravel_index(torch.tensor(index), tensor.shape))
    if how != "bit":
        tensor[place] = float(how)
        return f"element {index} became {how}"
    nonzero = torch.nonzero(tensor)
    if len(nonzero):
        place = tuple(nonzero[index % len(nonzero)].tolist())
    bits = 8 * tensor.itemsize
    bit = chance.randrange(max(0, bits - 16), bits - 7) if bits > 8 else chance.randrange(bits)
    words = tensor[place].reshape(1).view(_INTEGERS[tensor.itemsize])
    flipped = words ^ torch.tensor([_signed(1 << bit, bits)], dtype=words.dtype)
    tensor[place] = flipped.view(tensor.dtype)[0]
    return f"bit {bit} of element {list(place)} flipped"


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if bits > 8 and value >> (bits - 1) else value
