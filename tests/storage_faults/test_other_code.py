"""Code of others on ``chaos::``: DCP's fsspec storage, and processes that a rank starts."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import storage_child
import torch
import torch.distributed.checkpoint as dcp
from object_servers import BUCKET
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from seatrial.chaos.inject import Position
from seatrial.chaos.storage import striking
from seatrial.chaos.storage.arming import ENVIRONMENT
from seatrial.chaos.trace import read_trace

SIZE = 100_000
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class TestDistributedCheckpoint:
    @pytest.fixture(params=["file", "s3"])
    def url(self, request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
        if request.param == "file":
            return f"chaos::file://{tmp_path}/saved", {}
        options = request.getfixturevalue("server").options
        return f"chaos::s3://{BUCKET}/{secrets.token_hex(8)}", {"s3": options}

    def save(self, url: tuple[str, dict[str, Any]], value: float) -> None:
        place, options = url
        dcp.save({"x": torch.full((SIZE,), value)}, storage_writer=FsspecWriter(place, **options))

    def load(self, url: tuple[str, dict[str, Any]]) -> torch.Tensor:
        place, options = url
        state = {"x": torch.zeros(SIZE)}
        dcp.load(state, storage_reader=FsspecReader(place, **options))
        return state["x"]

    def test_it_saves_and_loads(self, url: tuple[str, dict[str, Any]]) -> None:
        self.save(url, 3.0)
        assert torch.equal(self.load(url), torch.full((SIZE,), 3.0))

    def test_a_full_disk_stops_the_save(self, url: tuple[str, dict[str, Any]]) -> None:
        with (
            striking("fail rank=0 at=storage/write path=*.distcp error=ENOSPC times=always"),
            pytest.raises(CheckpointException) as caught,
        ):
            self.save(url, 1.0)
        assert "No space left on device (injected" in str(caught.value)

    def test_a_bit_that_flips_at_rest_goes_unnoticed(self, url: tuple[str, dict[str, Any]]) -> None:
        """Which is why this project's store digests what it reads."""
        with striking("corrupt rank=0 at=storage/commit path=*.distcp") as struck:
            self.save(url, 3.0)
        assert len(struck.changes) == 1
        assert int((self.load(url) != 3.0).sum()) == 1


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_processes_are_struck_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    schedule = "fail rank=1 at=storage/write error=ENOSPC"
    position = Position(rank=1, world_size=2, ranks_per_node=2, attempt=1, store="", pids=tmp_path)
    trace = tmp_path / "trace.jsonl"
    plan = {
        "schedule": schedule,
        "position": asdict(position) | {"pids": str(tmp_path)},
        "strikes": str(tmp_path),
        "trace": str(trace),
    }
    monkeypatch.setenv(ENVIRONMENT, json.dumps(plan))
    program = [sys.executable, storage_child.__file__, method, str(tmp_path / "a")]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=120)
    said = done.stdout
    assert "No space left on device (injected" in said
    assert [r["change"] for r in read_trace(trace) if r["kind"] == "operation"] == ["ENOSPC"]
