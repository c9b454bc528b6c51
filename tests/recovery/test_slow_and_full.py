"""Storage that is full, slow, read-only or over quota, wherever it is.

Whatever fails, and at whichever operation of a save: the error names rank, file and cause on all
ranks, the previous checkpoint stays valid, and the next attempt succeeds once the fault is gone.
Real full and read-only disks are tried where this user may mount one."""

from __future__ import annotations

import resource
import signal
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from seatrial.chaos.storage import striking
from seatrial.recovery import CheckpointStore
from seatrial.recovery.errors import CheckpointError, SaveError
from seatrial.recovery.exchange import Exchange

from .places import Place

LARGE = 1 << 20  # elements of 4 bytes: more than the small disk has left


def saves_again(place: Place, make_state: Any, same_tensors: Any) -> None:
    """The fault is gone: the step is saved, restored and leaves nothing behind."""
    store = place.store()
    store.save(make_state(3), step=2)
    state = make_state(0)
    restored = store.restore(state)
    assert (restored.step, restored.damaged) == (2, ())
    assert same_tensors(state, make_state(3))
    assert place.inspect().leftovers == ()


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("ENOSPC", "No space left on device"),
        ("EDQUOT", "Disk quota exceeded"),
        ("EROFS", "Read-only file system"),
        ("EACCES", "Permission denied"),
    ],
)
def test_all_ranks_learn_which_rank_failed_on_which_file_and_why(
    place: Place, make_state: Any, same_tensors: Any, run_threads: Any, error: str, cause: str
) -> None:
    place.store().save(make_state(1), step=1)

    def work(rank: int, exchange: Exchange) -> None:
        place.store(exchange=exchange).save(make_state(2), step=2)

    fault = f"fail rank=0 at=storage/write path=*rank-00001.safetensors error={error} times=always"
    with striking(fault) as struck:
        results = run_threads(2, work)
    assert struck.changes == [f"storage/write: {error}"]
    for result in results:
        assert isinstance(result, SaveError), result
        assert "step 2 was not saved: rank 1: " in str(result)
        assert cause in str(result)
        assert "rank-00001.safetensors" in str(result)
    assert place.inspect().latest_valid == 1
    saves_again(place, make_state, same_tensors)


@pytest.mark.parametrize(
    ("place", "when"),
    [
        *(("directory", "before"), ("directory", "after")),
        *(("memory", "before"), ("memory", "after"), ("seaweedfs", "before")),
    ],
    indirect=["place"],
)
def test_at_whichever_operation_a_save_fails_nothing_is_lost(
    place: Place, make_state: Any, same_tensors: Any, when: str
) -> None:
    """Fail the first operation, then the second, … until nothing is left to fail."""
    for nth in range(1, 200):
        place = Place(f"{place.location}-{nth}", place.options, place.server)
        store = place.store()
        store.save(make_state(1), step=1)
        fault = f"fail rank=0 at=storage/* nth={nth} when={when} error=ENOSPC"
        published, said = False, ""
        with striking(fault) as struck, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of what could not be collected
            try:
                store.save(make_state(2), step=2)
                published = True
            except SaveError as error:
                said = str(error)
                published = "was published" in said or "is there" in said
        assert published or "No space left on device" in said
        if not struck.changes:
            assert nth > 5
            return
        report = place.inspect()
        assert report.latest_valid in ((2,) if published else (1, 2))
        assert all(step.valid for step in report.steps if step.published)
        if report.latest_valid == 1:
            saves_again(place, make_state, same_tensors)
        assert place.store().restore(make_state(0)).step == 2
        assert place.inspect().leftovers == ()
    raise AssertionError("a save does not end")


def test_a_restore_succeeds_on_a_disk_that_is_full(
    place: Place, make_state: Any, same_tensors: Any
) -> None:
    """A disk that is full when the job comes back must not keep it from going on."""
    for step in (1, 2):
        place.store().save(make_state(step), step=step)
    state = make_state(0)
    with (
        striking("fail rank=0 at=storage/write error=ENOSPC times=always"),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        restored = place.store(keep_last=1).restore(state)
    said = [str(warning.message) for warning in warned]
    assert any("it could not be noted" in each and "No space left" in each for each in said), said
    assert (restored.step, restored.damaged) == (2, ())
    assert same_tensors(state, make_state(2))


def test_a_store_that_asks_to_slow_down_is_asked_again(
    place: Place, make_state: Any, same_tensors: Any
) -> None:
    if place.has_fsync:
        pytest.skip("in a directory a failed write is not tried again")
    with striking("fail rank=0 at=storage/write error=SlowDown times=2") as struck:
        place.store().save(make_state(1), step=1)
    assert struck.changes == ["storage/write: SlowDown"] * 2
    state = make_state(0)
    place.store().restore(state)
    assert same_tensors(state, make_state(1))


def test_a_store_that_stalls_on_one_rank_stops_all_by_name(
    place: Place, make_state: Any, same_tensors: Any, run_threads: Any
) -> None:
    place.store().save(make_state(1), step=1)

    def work(rank: int, exchange: Exchange) -> None:
        place.store(exchange=exchange).save(make_state(2), step=2)

    fault = "delay rank=0 at=storage/write path=*rank-00001.safetensors seconds=1"
    with striking(fault):
        results = run_threads(2, work, timeout_s=0.5)
    assert all(isinstance(result, CheckpointError) for result in results), results
    said = str(results[0])
    assert "rank 1 did not report ('report') within 0.5 s" in said
    assert "rank-00001.safetensors" in said
    assert place.inspect().latest_valid == 1
    saves_again(place, make_state, same_tensors)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "seatrial-test", str(disk)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mount.returncode:
        pytest.skip(f"this user may not mount a disk: {mount.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


def test_a_disk_that_fills_up_in_the_middle_of_a_save_loses_nothing(
    small_disk: Path, make_state: Any, same_tensors: Any, fork_ranks: Any
) -> None:
    place = Place(str(small_disk / "store"))
    large = make_state(2)
    large.live["large"] = torch.zeros(LARGE)
    place.store().save(make_state(1), step=1)

    def work(rank: int, exchange: Exchange) -> None:
        CheckpointStore(place.location, exchange=exchange).save(large, step=2)

    results = fork_ranks(2, work)
    for result in results:
        assert isinstance(result, SaveError), result
        assert "OSError: [Errno 28] No space left on device" in str(result)
        assert f"{small_disk}/store/step-00000002/attempt-" in str(result)
        assert "step 2 was not saved: rank " in str(result)
    assert place.inspect().latest_valid == 1
    remount(small_disk, "size=16m")
    fork_ranks(2, work)
    assert place.inspect().latest_valid == 2
    assert place.inspect().leftovers == ()


def test_a_disk_that_became_read_only_can_be_restored_from_and_saves_when_it_is_writable(
    small_disk: Path, make_state: Any, same_tensors: Any
) -> None:
    place = Place(str(small_disk / "store"))
    place.store().save(make_state(1), step=1)
    remount(small_disk, "ro")
    with pytest.raises(SaveError, match=r"rank 0: OSError: .*Read-only file system: .*/disk/store"):
        place.store().save(make_state(2), step=2)
    state = make_state(0)
    with pytest.warns(RuntimeWarning, match="Read-only file system"):
        assert place.store().restore(state).step == 1
    assert same_tensors(state, make_state(1))
    remount(small_disk, "rw")
    saves_again(place, make_state, same_tensors)


def test_a_rank_that_may_not_write_as_much_stops_all_by_name(
    tmp_path: Path, make_state: Any, fork_ranks: Any
) -> None:
    place = Place(str(tmp_path / "store"))
    place.store().save(make_state(1), step=1)
    large = make_state(2)
    large.live["large"] = torch.zeros(LARGE)

    def work(rank: int, exchange: Exchange) -> None:
        if rank == 0:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        CheckpointStore(place.location, exchange=exchange).save(large, step=2)

    for result in fork_ranks(2, work):
        assert isinstance(result, SaveError), result
        assert "step 2 was not saved: rank 0: OSError: [Errno 27] File too large" in str(result)
        assert "rank-00000.safetensors" in str(result)
    assert place.inspect().latest_valid == 1
