"""What the disk that observes remembers: whose files are checkpoints, what is missing or damaged,
and what was tried again."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
from on_disk import Armed

from seatrial.chaos.observed.control import store_is_the_jobs
from seatrial.recovery.probe import around


@pytest.mark.parametrize("is_saving", [True, False])
def test_only_what_is_written_in_a_save_is_part_of_a_checkpoint(
    armed: Armed, is_saving: bool
) -> None:
    with armed("corrupt rank=0 at=storage/write") as disk:
        store_is_the_jobs(str(disk.store))
        with around("step", step=4):
            pass
        with around("checkpoint", step=4) if is_saving else nullcontext():
            (disk.store / "a").write_bytes(b"1")
        (disk.store / "a").read_bytes()
        assert [record["step"] for record in disk.of("damage")] == [4] * is_saving
        assert [record["step"] for record in disk.of("met")] == [4 if is_saving else None]


def test_a_refusal_is_dealt_with_by_who_opens_the_file_again_and_not_by_who_gives_up(
    armed: Armed,
) -> None:
    with armed("fail rank=0 at=storage/write error=EIO") as disk:
        path = disk.store / "a"
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
        with pytest.raises(OSError, match="Input/output error"):
            os.write(descriptor, b"1")
        os.write(descriptor, b"2")  # as code does that tidies up
        (disk.store / "b").write_bytes(b"3")
        os.close(descriptor)
        assert not disk.of("overcome")
        for _ in range(2):
            path.write_bytes(b"4")
        (again,) = disk.of("overcome")
        assert (again["event"], again["file"]) == ("storage/write", str(path))


@pytest.mark.parametrize("operation", ["commit", "rename", "read"])
def test_each_kind_of_operation_can_be_tried_again(armed: Armed, operation: str) -> None:
    with armed(f"fail rank=0 at=storage/{operation} error=EIO path=*/a") as disk:
        old, path = disk.store / "old", disk.store / "a"

        def do() -> None:
            if operation == "rename":
                old.write_bytes(b"1")
                os.replace(old, path)
            else:
                path.write_bytes(b"1")
                path.read_bytes()

        with pytest.raises(OSError, match="Input/output error"):
            do()
        assert not disk.of("overcome")
        do()
        assert [each["event"] for each in disk.of("overcome")] == [f"storage/{operation}"]


@pytest.mark.parametrize("looks", ["opens", "lists", "lists above", "deletes it"])
@pytest.mark.parametrize("is_moved", [True, False])
def test_a_file_that_is_missing_is_missed_by_who_lists_its_directory_under_any_name(
    armed: Armed, looks: str, is_moved: bool
) -> None:
    with armed("lose rank=0 at=storage/commit path=*/a") as disk:
        directory = disk.store / "new"
        directory.mkdir()
        (directory / "a").write_bytes(b"1")
        if is_moved:
            directory = directory.rename(disk.store / "final")
        if looks == "opens":
            assert not (directory / "a").exists()
        elif looks == "lists":
            assert os.listdir(directory) == []
        elif looks == "lists above":
            assert os.listdir(disk.store) == [directory.name]
        else:
            directory.rmdir()
            directory.mkdir()
            assert os.listdir(directory) == []
        met = [str(directory / "a")] * (looks in ("opens", "lists"))
        assert [str(each["file"]) for each in disk.of("met")] == met


@pytest.mark.parametrize("change", ["a write", "a shorter file", "another file", "nothing"])
def test_what_lands_late_damages_what_was_written_in_the_meantime(
    armed: Armed, change: str
) -> None:
    event = "commit" if change == "another file" else "write"
    with armed(f"late rank=0 at=storage/{event} path=*/a hold=3") as disk:
        descriptor = os.open(disk.store / "a", os.O_CREAT | os.O_WRONLY)
        os.pwrite(descriptor, b"old old", 0)
        if change == "a write":
            os.pwrite(descriptor, b"new", 4)
        elif change == "a shorter file":
            os.ftruncate(descriptor, 3)
        elif change == "another file":
            os.close(descriptor)
            descriptor = os.open(disk.store / "a", os.O_CREAT | os.O_WRONLY)
            os.pwrite(descriptor, b"new", 0)
        for _ in range(4):
            os.listdir(disk.store)
        (disk.store / "a").rename(disk.store / "b")
        assert (disk.store / "b").read_bytes() == b"old old"
        met = [str(each["file"]) for each in disk.of("met")]
        assert (str(disk.store / "b") in met) == (change != "nothing")
        os.close(descriptor)
