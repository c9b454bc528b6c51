"""A byte-level dataset cut from one text, the same on every rank.

Guarantees: the same text gives the same windows everywhere; window ``i`` starts at
``i * (len(text) - length) // (count - 1)``, so they spread evenly from the first byte to the last.
Nothing is downloaded: the default text is the Python language reference that CPython carries.

Does not: tokenize, decode, or keep windows apart (short texts give overlapping ones).
"""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path

import torch

from seatrial.recovery.errors import RecoveryError

_DEFAULT_MODULE = "pydoc_data.topics"


class TextError(RecoveryError, ValueError):
    """A text that cannot be read or is too short for the windows asked for."""


def load_text(path: str | Path = "") -> bytes:
    """The bytes of a file or, without a path, of CPython's ``pydoc_data.topics``, topics sorted.

    Raises:
        TextError: the file cannot be read or is empty, or this Python carries no topics.
    """
    if path:
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise TextError(f"the text {path} cannot be read: {error.strerror}") from error
    else:
        text = _default_text()
    if not text:
        raise TextError(f"the text {path or _DEFAULT_MODULE} is empty; give another with text=PATH")
    return text


@cache
def _default_text() -> bytes:
    try:
        topics = importlib.import_module(_DEFAULT_MODULE).topics
    except ImportError as error:
        raise TextError(
            f"this Python has no {_DEFAULT_MODULE}, the default text; give one with text=PATH"
        ) from error
    return "\n".join(topics[name] for name in sorted(topics)).encode()


class ByteWindows:
    """Windows of ``context + 1`` bytes: inputs are the first ``context``, targets the last.

    Raises:
        TextError: the text is shorter than one window.
    """

    def __init__(self, text: bytes, *, context: int, num_samples: int) -> None:
        length = context + 1
        if context < 1 or num_samples < 1:
            raise ValueError(
                f"context={context} and num_samples={num_samples} must both be at least 1"
            )
        if len(text) < length:
            raise TextError(
                f"the text has {len(text)} bytes, and one window of context={context} needs "
                f"{length}; give a longer text or a smaller context"
            )
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        last = len(text) - length
        steps = max(1, num_samples - 1)
        starts = torch.arange(num_samples, dtype=torch.int64) * last // steps
        self._positions = starts[:, None] + torch.arange(length)

    def __len__(self) -> int:
        return len(self._positions)

    def batch(self, indices: torch.Tensor) -> torch.Tensor:
        """The windows of ``indices`` (int64 ``[n]``): int64, shape ``[n, context + 1]``, 0..255."""
        return self._bytes[self._positions[indices]].long()
