"""What `torch.distributed.checkpoint` on the manifest store refuses, and what the errors say.

In one process; errors of several ranks are in `test_dcp_ranks`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from seatrial.recovery import CheckpointStore, SeatrialReader, SeatrialWriter
from seatrial.recovery import errors as ours

from .dcp_calls import dcp, failure, load, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Custom:
    pass


@pytest.mark.parametrize("value", [Custom(), torch.float32, torch.empty(2, device="meta")])
def test_what_cannot_be_stored_is_refused_by_name_and_nothing_is_published(
    directory: Path, value: object
) -> None:
    with pytest.raises(CheckpointException) as caught:
        save({"good": torch.ones(1), "bad": [value]}, directory)
    error = failure(caught)
    assert isinstance(error, ours.StateError)
    assert "bad" in str(error)
    assert CheckpointStore(directory).latest() is None


@pytest.mark.parametrize(("step", "text"), [(None, "nothing is published"), (5, "step 5 is not")])
def test_a_step_that_is_not_there_is_an_error(directory: Path, step: int | None, text: str) -> None:
    with pytest.raises(CheckpointException, match=text):
        load({"w": torch.zeros(1)}, directory, step=step)
    with pytest.raises(ours.CheckpointError, match=text):
        SeatrialReader(directory, step=step).read_metadata()


def flip_in(path: Path, position: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("pattern", ["*.safetensors", "*.json"])
def test_damage_is_an_error_that_says_which_step_and_file_and_what_is_older(
    directory: Path, pattern: str
) -> None:
    for step in (1, 2):
        save({"w": torch.ones(5), "value": [1, 2]}, directory, step=step)
    (path,) = (directory / "step-00000002").glob(f"attempt-*/{pattern}")
    flip_in(path)
    with pytest.raises(CheckpointException) as caught:
        load({"w": torch.zeros(5), "value": None}, directory)
    error = failure(caught)
    assert isinstance(error, ours.DamagedCheckpointError)
    assert "step 2" in str(error)
    assert path.name in str(error)
    assert "Older steps are [1]" in str(error)
    assert load({"w": torch.zeros(5)}, directory, step=1)["w"].sum() == 5


def test_a_damaged_manifest_is_an_error_and_no_older_step_is_taken(directory: Path) -> None:
    for step in (1, 2):
        save({"w": torch.ones(5)}, directory, step=step)
    flip_in(directory / "step-00000002/manifest.json")
    with pytest.raises(CheckpointException, match=r"step 2 .* not whole.*Older steps are \[1\]"):
        load({"w": torch.zeros(5)}, directory)


def test_nothing_is_cast(directory: Path) -> None:
    save({"w": torch.ones(5)}, directory)
    target = torch.zeros(5, dtype=torch.float64)
    with pytest.raises(CheckpointException) as caught:
        load({"w": target}, directory)
    assert isinstance(failure(caught), ours.MismatchError)
    assert "w is float32[5] in the checkpoint and float64[5] here" in str(failure(caught))
    assert target.sum() == 0


class Scrambling(DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        return object if isinstance(object, torch.Tensor) else io.BytesIO(b"my own format")


def test_a_planner_with_a_format_of_its_own_is_refused(directory: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        save({"v": 3}, directory, planner=Scrambling())
    assert isinstance(failure(caught), ours.StateError)
    assert "Scrambling encodes 'v' in its own way" in str(failure(caught))


def test_plans_that_are_cached_are_refused_before_they_write_elsewhere(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cache in ("_cached_save_plan", "_cached_final_save_plan", "_cached_all_plans"):
        monkeypatch.setattr(dcp.SavePlanner, cache, {})
    for cache in ("_cached_global_plan", "_cached_metadata"):
        monkeypatch.setattr(dcp.SavePlanner, cache, {})
    planner = DefaultSavePlanner(enable_plan_caching=True)
    save({"w": torch.ones(1)}, directory, step=1, planner=planner)
    with pytest.raises(CheckpointException) as caught:
        save({"w": torch.ones(1)}, directory, step=2, planner=planner)
    assert "enable_plan_caching=False" in str(failure(caught))
    assert CheckpointStore(directory).latest() == 1


def test_ranks_that_save_on_their_own_are_refused(directory: Path) -> None:
    with pytest.raises(ours.SaveError, match="use_collectives=False"):
        save({"w": torch.ones(1)}, directory, use_collectives=False)


def test_a_checkpoint_id_beside_writer_or_reader_is_refused(directory: Path) -> None:
    with pytest.raises(ours.CheckpointError, match="leave checkpoint_id out"):
        save({"w": torch.ones(1)}, directory, checkpoint_id=directory)
    save({"w": torch.ones(1)}, directory)
    with pytest.raises(ours.CheckpointError, match="leave checkpoint_id out"):
        dcp.load({}, storage_reader=SeatrialReader(directory), checkpoint_id="x")
    assert not SeatrialWriter.validate_checkpoint_id(directory)
    assert not SeatrialReader.validate_checkpoint_id(directory)


def test_a_negative_step_is_refused(directory: Path) -> None:
    with pytest.raises(ValueError, match="0 or more"):
        SeatrialWriter(directory, step=-1)
