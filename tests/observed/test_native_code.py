"""Code that knows nothing of this project, on the disk that observes: it is seen, and it is struck.

What a trial makes of it is in `test_trials.py`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from on_disk import Armed
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import CheckpointException

from seatrial.chaos.powerloss import PowerDisk

STATE = {"w": torch.arange(50_000.0)}
EVERYTHING = "delay rank=0 at=storage/* seconds=1e-9 times=always"


def by_torch(path: Path) -> None:
    torch.save(STATE, path)


def by_safetensors(path: Path) -> None:
    save_file(STATE, path)


def by_python(path: Path) -> None:
    path.write_bytes(STATE["w"].numpy().tobytes())


def by_shutil(path: Path) -> None:
    shutil.copyfile("/proc/self/exe", path)


def by_dcp(path: Path) -> None:
    dcp.save(STATE, checkpoint_id=path, no_dist=True)


SAVERS = [by_torch, by_safetensors, by_python, by_shutil, by_dcp]


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("save", SAVERS)
def test_a_full_disk_stops_whoever_writes(armed: Armed, save: Callable[[Path], None]) -> None:
    with armed("fail rank=0 at=storage/write error=ENOSPC times=always") as disk:
        with pytest.raises((Exception, CheckpointException)):
            save(disk.store / "file")
        assert set(disk.changes) == {"storage/write: ENOSPC"}


def test_each_operation_is_seen_by_its_name(armed: Armed) -> None:
    with armed(EVERYTHING) as disk:
        path = disk.store / "a"
        path.write_bytes(b"1234")
        os.truncate(path, 3)
        with path.open("rb") as file:
            os.fsync(file.fileno())
            assert file.read() == b"123"
        os.replace(path, disk.store / "b")
        os.link(disk.store / "b", disk.store / "c")
        assert sorted(os.listdir(disk.store)) == ["b", "c"]
        os.unlink(disk.store / "c")
        (disk.store / "d").mkdir()
        (disk.store / "d").rmdir()
        assert not path.exists()
        seen = disk.operations
    changing = [each for each in seen if not each.startswith("stat")]
    assert changing == [
        *("create a", "write a", "commit a", "create a", "sync a", "read a", "rename b"),
        *("publish c", f"list {disk.store.name}", "delete c", "create d", "delete d"),
    ]
    assert "stat a" in seen


def test_each_reading_is_seen_though_the_kernel_could_remember(armed: Armed) -> None:
    with armed("fail rank=0 at=storage/read nth=99") as disk:
        by_python(disk.store / "a")
        with (disk.store / "a").open("rb") as file:
            for _ in range(3):
                file.seek(0)
                file.read(10_000)
                file.seek(0)
        assert disk.operations.count("read a") >= 3


@pytest.mark.parametrize("load", [load_file, torch.load])
def test_a_bit_that_flips_on_the_way_reaches_what_is_mapped_and_what_is_read(
    armed: Armed, load: Callable[[Path], dict[str, torch.Tensor]]
) -> None:
    save = by_safetensors if load is load_file else by_torch
    with armed("corrupt rank=0 at=storage/read nth=2 path=*/a") as disk:
        save(disk.store / "a")
        wrong = load(disk.store / "a")
        assert int((wrong["w"] != STATE["w"]).sum()) == 1
        assert len(disk.of("met")) == 1
        assert torch.equal(load(disk.store / "a")["w"], STATE["w"])


def test_torch_that_maps_its_file_is_struck(armed: Armed) -> None:
    with armed("corrupt rank=0 at=storage/read nth=12 path=*/a") as disk:
        by_torch(disk.store / "a")
        wrong = torch.load(disk.store / "a", mmap=True)["w"].clone()
        assert disk.changes
        assert int((wrong != STATE["w"]).sum()) <= 1


def test_a_reading_that_fails_fails_for_the_program(armed: Armed) -> None:
    """Though the kernel swallows errors of what it reads ahead."""
    with armed("fail rank=0 at=storage/read error=EIO") as disk:
        by_python(disk.store / "a")
        with pytest.raises(OSError, match="Input/output error"):
            (disk.store / "a").read_bytes()
        assert len(disk.of("told")) == 1
        assert (disk.store / "a").read_bytes() == STATE["w"].numpy().tobytes()


def test_a_page_that_cannot_be_fetched_ends_who_mapped_it(armed: Armed) -> None:
    program = "import mmap, sys; f = open(sys.argv[1], 'rb'); mmap.mmap(f.fileno(), 0, access=1)[0]"
    with armed("fail rank=0 at=storage/read") as disk:
        by_python(disk.store / "a")
        done = subprocess.run([sys.executable, "-c", program, disk.store / "a"], check=False)
        assert done.returncode == -signal.SIGBUS


@pytest.mark.parametrize("save", [by_torch, by_safetensors, by_python])
def test_a_bit_that_flips_at_rest_is_there_for_good(
    armed: Armed, save: Callable[[Path], None]
) -> None:
    with armed("corrupt rank=0 at=storage/commit") as disk:
        path = disk.store / "a"
        save(path)
        wrong = path.read_bytes()
        save(path)
        right = path.read_bytes()
        differing = [a ^ b for a, b in zip(wrong, right, strict=True) if a != b]
        assert [each.bit_count() for each in differing] == [1]
        assert [record["file"] for record in disk.of("met")] == [str(disk.store / "a")]


@pytest.mark.parametrize(
    ("fault", "left"),
    [
        ("short rank=0 at=storage/write keep=5", b"01234"),
        ("short rank=0 at=storage/commit keep=5", b"01234"),
        ("lose rank=0 at=storage/write", b""),
        ("late rank=0 at=storage/write hold=99", b""),
        ("lose rank=0 at=storage/commit", None),
        ("late rank=0 at=storage/commit hold=99", None),
        ("lose rank=0 at=storage/rename", b"old"),
        ("late rank=0 at=storage/rename hold=99", b"old"),
    ],
)
def test_what_is_acknowledged_is_not_what_is_there(
    armed: Armed, fault: str, left: bytes | None
) -> None:
    with armed(fault) as disk:
        path = disk.store / "a"
        if "rename" in fault:
            path.write_bytes(b"old")
            (disk.store / "new").write_bytes(b"0123456789")
            os.replace(disk.store / "new", path)
        else:
            path.write_bytes(b"0123456789")
        assert (path.read_bytes() if path.exists() else None) == left
        assert bool(disk.of("met")) == ("rename" not in fault)
    # What was held back is carried out when the rank leaves in good order.
    held = (path.read_bytes() if path.exists() else None) if "late" in fault else b"0123456789"
    assert held == b"0123456789"


def test_a_write_that_lands_late_lands_in_the_file_whatever_its_name_is_then(armed: Armed) -> None:
    with armed("late rank=0 at=storage/write hold=9") as disk:
        (disk.store / "new").write_bytes(b"content")
        os.replace(disk.store / "new", disk.store / "a")
        assert (disk.store / "a").read_bytes() == b""
        for _ in range(9):
            os.listdir(disk.store)
        assert (disk.store / "a").read_bytes() == b"content"


def test_a_rank_may_be_served_what_was_there_before(armed: Armed) -> None:
    stale = "stale rank=0 at=storage/"
    with armed(f"{stale}read nth=2; {stale}list nth=2; {stale}stat path=*/c nth=2") as disk:
        path = disk.store / "a"
        path.write_bytes(b"old")
        assert path.read_bytes() == b"old"
        assert os.listdir(disk.store) == ["a"]
        path.write_bytes(b"new")
        assert path.read_bytes() == b"old"
        (disk.store / ".b").touch()
        assert os.listdir(disk.store) == ["a"]
        assert path.read_bytes() == b"new"
        assert sorted(os.listdir(disk.store)) == [".b", "a"]
        (disk.store / "c").write_bytes(b"")
        assert [(disk.store / "c").exists() for _ in range(2)] == [False, True]


def test_threads_and_children_of_a_rank_are_the_rank(armed: Armed) -> None:
    with armed("fail rank=0 at=storage/write error=EDQUOT path=*/a times=2") as disk:
        errors: list[str] = []

        def write() -> None:
            try:
                (disk.store / "a").write_bytes(b"x")
            except OSError as error:
                errors.append(str(error))

        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        assert "Disk quota exceeded" in errors[0]
        child = subprocess.run(["dd", "if=/dev/zero", f"of={disk.store}/a", "count=1"], check=False,
                               capture_output=True, text=True)  # fmt: skip
        assert "Disk quota exceeded" in child.stderr


def test_a_process_of_no_rank_is_let_through_and_noted(armed: Armed) -> None:
    with armed("fail rank=0 at=storage/write times=always") as disk:
        script = f"(setsid sh -c 'sleep 0.1; echo x > {disk.store}/a; echo done' &)"
        said = subprocess.run(["setsid", "sh", "-c", script], capture_output=True, check=True)
        assert said.stdout == b"done\n"
        assert (disk.store / "a").read_bytes() == b"x\n"
        assert [str(each["file"]) for each in disk.of("stranger")] == [str(disk.store / "a")]
        assert not disk.changes


def test_what_is_written_beside_the_disk_is_noted(armed: Armed, tmp_path: Path) -> None:
    with armed("fail rank=0 at=storage/write") as disk:
        if disk.of("disk")[0]["watched"] is not True:
            pytest.skip("fanotify needs root")
        by_torch(tmp_path / "t")
        by_safetensors(tmp_path / "s")
    files = [Path(str(each["file"])).name for each in disk.of("elsewhere")]
    assert "t" in files
    assert "s" in files or any(name.startswith(".tmp") for name in files)
    assert not disk.changes


def test_an_operation_of_this_projects_code_is_not_counted_twice(armed: Armed) -> None:
    from seatrial.recovery.probe import perform

    with armed("fail rank=0 at=storage/write nth=2 error=ENOSPC") as disk:
        path = disk.store / "a"
        perform("storage/write", path.write_bytes, b"1", file=str(path))
        with pytest.raises(OSError, match="No space left"):
            perform("storage/write", path.write_bytes, b"2", file=str(path))
        assert disk.changes == ["storage/write: ENOSPC"]


@pytest.mark.parametrize(("when", "left"), [("before", b"1"), ("after", b"12")])
def test_a_rank_that_is_killed_at_an_operation_does_nothing_more(
    armed: Armed, observing_disk: PowerDisk, when: str, left: bytes
) -> None:
    path = observing_disk.root / f"killed-{when}"
    if (child := os.fork()) == 0:
        with armed(f"kill rank=0 at=storage/write nth=2 when={when}"):
            descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
            for byte in (b"1", b"2", b"3"):
                os.write(descriptor, byte)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    observing_disk.part()
    assert path.read_bytes() == left


def test_symbolic_links_can_be_made(armed: Armed) -> None:
    with armed(EVERYTHING) as disk:
        os.symlink("a", disk.store / "latest")
        assert os.readlink(disk.store / "latest") == "a"
        assert "create latest" in disk.operations
