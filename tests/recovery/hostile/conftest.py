"""Two checkpoints to be made hostile, with a secret beside them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from seatrial.recovery import CheckpointStore, SeatrialWriter

from ..dcp_calls import dcp
from .checkpoints import SECRET


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory, make_state: Any) -> Path:
    """Step 1 by the store, step 2 through DCP with tied weights and a value; and a secret."""
    root = tmp_path_factory.mktemp("hostile")
    CheckpointStore(root / "store").save(make_state(1), step=1)
    weight = torch.arange(6.0)
    state = {"a": weight, "b": weight, "value": {"lr": 0.5}}
    dcp.save(state, storage_writer=SeatrialWriter(root / "store", step=2))
    (root / "secret").write_bytes(SECRET * 100)
    return root


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    """A copy of it for one test."""
    return Path(shutil.copytree(pristine, tmp_path / "hostile"))
