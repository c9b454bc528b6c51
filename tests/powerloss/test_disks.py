"""Verifies disks that lose power with real programs on them: the simulated one, real ext4 and XFS.

What was made durable is there afterwards, what was not is seen to be lost, nothing stays mounted.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from seatrial.chaos.errors import UsageError
from seatrial.chaos.powerloss import KINDS, PowerDisk, check_kind, open_disk
from seatrial.chaos.powerloss.control import cut_from_rank
from seatrial.chaos.powerloss.mounts import unmount, unmount_below
from seatrial.recovery.publish import fsync_directory

SIZE = 300_000


def require(kind: str) -> None:
    try:
        check_kind(kind)
    except UsageError as error:
        pytest.skip(str(error))


@pytest.fixture(params=KINDS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PowerDisk]:
    require(request.param)
    opened = open_disk(request.param, tmp_path / "disk")
    yield opened
    opened.close()
    assert not os.path.ismount(opened.root)
    assert not (tmp_path / "disk").exists()


@pytest.fixture
def simulated(tmp_path: Path) -> Iterator[PowerDisk]:
    require("fuse")
    opened = open_disk("fuse", tmp_path / "disk")
    yield opened
    opened.close()


def cut(disk: PowerDisk, survives: str = "names") -> list[str] | None:
    """``names`` is what ext4 and XFS come to when they have written their journal."""
    cut_from_rank(str(disk.root), survives)
    return disk.restore_power()


def by_torch(path: Path) -> None:
    torch.save({"w": torch.ones(SIZE)}, path)


def by_safetensors(path: Path) -> None:
    save_file({"w": torch.ones(SIZE)}, path)


def by_python(path: Path) -> None:
    path.write_bytes(os.urandom(SIZE))


def commit_journal(disk: PowerDisk) -> None:
    """What ext4 and XFS do by themselves within some seconds: all names so far are durable."""
    with (disk.root / "other").open("wb") as file:
        os.fsync(file.fileno())


def test_safetensors_may_leave_a_file_of_the_right_length_and_only_zeros(disk: PowerDisk) -> None:
    """It sets the length first, which is a change of names to the journal, and syncs nothing."""
    by_safetensors(disk.root / "not")
    size_bytes = (disk.root / "not").stat().st_size
    commit_journal(disk)
    assert cut(disk) == ["not has other bytes"]
    assert (disk.root / "not").read_bytes() == bytes(size_bytes)


@pytest.mark.parametrize("save", [by_torch, by_python])
def test_what_is_not_synced_is_lost_whoever_wrote_it(
    disk: PowerDisk, save: Callable[[Path], None]
) -> None:
    save(disk.root / "synced")
    save(disk.root / "not")
    with open(disk.root / "synced", "rb") as file:
        os.fsync(file.fileno())
    fsync_directory(disk.root)
    expected = (disk.root / "synced").read_bytes()
    size_bytes = (disk.root / "not").stat().st_size
    assert cut(disk) == [f"not has 0 of {size_bytes} bytes"]
    assert (disk.root / "synced").read_bytes() == expected


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_dcp_save_leaves_an_empty_metadata_file(disk: PowerDisk) -> None:
    """It is synced while its bytes are still in Python's buffer; so nothing can be loaded."""
    where = disk.root / "checkpoint"
    dcp.save({"w": torch.ones(SIZE)}, checkpoint_id=where, no_dist=True)
    assert (where / ".metadata").stat().st_size > 0
    commit_journal(disk)
    cut(disk)
    assert (where / ".metadata").stat().st_size == 0
    with pytest.raises(BaseException, match=r"EOF|Ran out of input"):
        dcp.load({"w": torch.zeros(SIZE)}, checkpoint_id=where, no_dist=True)


def test_a_second_power_loss_is_like_the_first(disk: PowerDisk) -> None:
    for number in range(3):
        by_python(disk.root / f"file{number}")
        fsync_directory(disk.root)
        assert cut(disk) == [f"file{number} has 0 of {SIZE} bytes"]


def test_a_file_that_is_overwritten_can_be_synced(simulated: PowerDisk) -> None:
    """Opened for writing alone, as ``open(path, "wb")`` does."""
    by_python(simulated.root / "file")
    fsync_directory(simulated.root)
    with (simulated.root / "file").open("wb") as file:
        file.write(b"new")
        file.flush()
        os.fsync(file.fileno())
    assert cut(simulated, "certain") == []
    assert (simulated.root / "file").read_bytes() == b"new"


def test_power_that_was_never_cut_is_not_restored(simulated: PowerDisk) -> None:
    assert simulated.restore_power() is None
    by_python(simulated.root / "file")
    assert cut(simulated, "certain") == ["file is gone"]
    assert simulated.restore_power() is None


def test_without_power_every_operation_fails(simulated: PowerDisk) -> None:
    by_python(simulated.root / "file")
    with open(simulated.root / "file", "r+b", buffering=0) as file:
        cut_from_rank(str(simulated.root), "all")
        for operate in (
            lambda: os.listdir(simulated.root),
            lambda: (simulated.root / "file").stat(),
            lambda: (simulated.root / "other").write_bytes(b""),
            lambda: file.write(b"x"),
            lambda: os.fsync(file.fileno()),
        ):
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                operate()
    assert simulated.restore_power() == []
    assert (simulated.root / "file").stat().st_size == SIZE


def test_files_behave_as_on_any_other_file_system(simulated: PowerDisk) -> None:
    root = simulated.root
    (root / "a").write_bytes(b"12345678")
    with (root / "a").open("ab") as file:
        file.write(b"9")
    os.truncate(root / "a", 7)
    os.link(root / "a", root / "b")
    os.replace(root / "a", root / "c")
    with (root / "c").open("rb") as file:
        os.unlink(root / "c")
        assert file.read() == b"1234567"
    assert os.listdir(root) == ["b"]
    with pytest.raises(FileExistsError):
        os.open(root / "b", os.O_CREAT | os.O_EXCL)
    with pytest.raises(FileNotFoundError):
        os.unlink(root / "a")
    (root / "d").mkdir()
    (root / "d").rmdir()
    with pytest.raises(OSError, match="not supported"):
        os.setxattr(root / "b", "user.other", b"x")
    with pytest.raises(OSError, match="Invalid"):
        os.setxattr(root / "b", "user.seatrial.power", b"off most")


def test_the_disk_goes_with_the_process_that_opened_it(tmp_path: Path) -> None:
    require("fuse")
    program = f"""
        import os, signal
        from pathlib import Path
        from seatrial.chaos.powerloss import open_disk
        open_disk("fuse", Path({str(tmp_path / "disk")!r}))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
    assert done.returncode == -signal.SIGKILL
    # The file system is told by the kernel, and unmounts a moment later.
    unmount(tmp_path / "disk" / "mounted")
    assert not os.path.ismount(tmp_path / "disk" / "mounted")
    assert os.listdir(tmp_path / "disk" / "mounted") == []


def test_whatever_is_mounted_below_a_directory_is_unmounted(
    disk: PowerDisk, tmp_path: Path
) -> None:
    with (disk.root / "in use").open("wb"):
        unmount_below(tmp_path)
    assert not os.path.ismount(disk.root)


def test_a_disk_whose_directory_is_reached_by_a_link_is_unmounted(tmp_path: Path) -> None:
    require("ext4")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    disk = open_disk("ext4", tmp_path / "link" / "disk")
    assert os.path.ismount(disk.root)
    try:
        disk.close()
        assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
        assert list((tmp_path / "real").iterdir()) == []
    finally:
        unmount_below(tmp_path)


def test_a_kind_that_there_is_not_is_refused() -> None:
    with pytest.raises(UsageError, match="'btrfs': choose one of fuse, ext4, xfs"):
        check_kind("btrfs")
