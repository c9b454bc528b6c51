"""How one process calls `torch.distributed.checkpoint` on the manifest store, and what it hears."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from seatrial.recovery import SeatrialReader, SeatrialWriter

dcp: Any = torch.distributed.checkpoint  # it exports nothing explicitly


def save(state: dict[str, Any], directory: Path, *, step: int = 1, **options: Any) -> None:
    dcp.save(state, storage_writer=SeatrialWriter(directory, step=step), **options)


def load(state: dict[str, Any], directory: Path, *, step: int | None = None) -> dict[str, Any]:
    dcp.load(state, storage_reader=SeatrialReader(directory, step=step))
    return state


def failure(caught: pytest.ExceptionInfo[CheckpointException], rank: int = 0) -> BaseException:
    """The error of one rank."""
    return caught.value.failures[rank][0]


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    raw = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return tensor.dtype, tensor.shape, raw.view(torch.uint8).numpy().tobytes()
