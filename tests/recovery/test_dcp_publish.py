"""When what `torch.distributed.checkpoint` saves is published: whole, once, or not at all.

In one process; kills of several ranks are in `test_dcp_ranks`."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed
from torch.distributed.checkpoint.api import CheckpointException

from seatrial.recovery import CheckpointStore, SeatrialWriter, inspect_store
from seatrial.recovery import errors as ours
from seatrial.recovery.probe import listen

from .announced import once_at
from .dcp_calls import dcp, failure, load, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def test_a_step_is_published_once(directory: Path) -> None:
    save({"w": torch.ones(1)}, directory)
    with pytest.raises(CheckpointException) as caught:
        save({"w": torch.zeros(1)}, directory)
    assert isinstance(failure(caught), ours.AlreadyPublishedError)
    assert load({"w": torch.zeros(1)}, directory)["w"] == 1


def test_an_async_save_is_published_with_the_values_of_the_call(directory: Path) -> None:
    weight = torch.ones(1000)
    writer = SeatrialWriter(directory, step=1)
    if not torch.distributed.is_available():
        pytest.skip("torch without distributed")
    future = dcp.async_save({"weight": weight}, storage_writer=writer, no_dist=True)
    weight.zero_()
    future.result()
    assert load({"weight": torch.zeros(1000)}, directory)["weight"].sum() == 1000


def test_an_error_before_any_event_of_a_save_publishes_nothing_and_the_step_can_be_repeated(
    directory: Path, announcements: list[tuple[str, str, dict[str, object]]]
) -> None:
    save({"w": torch.ones(1)}, directory, step=0)
    events = [event for event, edge, _ in announcements if edge == "before"]
    assert events == [
        "checkpoint/shard/write",
        "checkpoint/shard/fsync",
        "checkpoint/shard/write",
        "checkpoint/shard/fsync",
        "checkpoint/directory/fsync",
        "checkpoint/manifest/write",
        "checkpoint/manifest/fsync",
        "checkpoint/manifest/link",
        "checkpoint/manifest/directory",
    ]
    for number, event in enumerate(events[:-1]):
        left = events[: number + 1].count(event)

        def fail(name: str, edge: str, facts: dict[str, object], event: str = event) -> None:
            nonlocal left
            left -= (name, edge) == (event, "before")
            if left == 0:
                raise OSError(28, "No space left on device")

        stop = listen(fail)
        writer = SeatrialWriter(directory, step=number + 1)
        with pytest.raises(CheckpointException, match="No space left"):
            dcp.save({"w": torch.ones(1)}, storage_writer=writer)
        stop()
        assert CheckpointStore(directory).latest() == number
        dcp.save({"w": torch.ones(1)}, storage_writer=writer)
        assert CheckpointStore(directory).latest() == number + 1
    # Only what lies in the store: other tests of this process come and go with theirs.
    assert [file for file in open_files() if file.startswith(str(directory))] == []


def test_files_that_were_collected_while_saving_are_not_published(directory: Path) -> None:
    def collect() -> None:
        CheckpointStore(directory).prune()
        save({"w": torch.zeros(1)}, directory)

    once_at("checkpoint/manifest/link", "before", collect)
    with pytest.raises(CheckpointException):
        save({"w": torch.ones(1)}, directory)
    assert load({"w": torch.ones(1)}, directory)["w"] == 0
    assert inspect_store(directory).latest_valid == 1


def open_files() -> list[str]:
    """What the descriptors of this process refer to."""
    files = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            files.append(os.readlink(f"/proc/self/fd/{number}"))
    return files
