"""``chaos::`` in front of a directory, memory and S3.

Without faults nothing differs, and each fault does to a single operation what it says.

Trials with these faults are in `test_trials`; the store's own backends in
`tests/recovery/test_slow_and_full`; code of others in `test_other_code`."""

from __future__ import annotations

import asyncio
import errno
import pickle
import secrets
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from object_servers import BUCKET, S3Server

from seatrial.chaos.storage import striking


def test_without_faults_it_does_what_its_target_does(place: tuple[Any, Any, str]) -> None:
    chaos, target, root = place
    with chaos.open(f"{root}/a", "wb") as file:
        assert file.write(b"hello ") == 6
        file.write(b"world")
    chaos.pipe_file(f"{root}/b", b"0123456789")
    chaos.cp_file(f"{root}/b", f"{root}/c")
    chaos.mv(f"{root}/c", f"{root}/d")
    assert target.cat_file(f"{root}/a") == b"hello world"
    with chaos.open(f"{root}/a", "rb") as file:
        assert (file.read(5), file.tell(), file.read()) == (b"hello", 5, b" world")
    assert chaos.cat_file(f"{root}/b", start=2, end=5) == b"234"
    assert chaos.info(f"{root}/d")["size"] == 10
    assert not chaos.exists(f"{root}/c")
    names = sorted(path.rpartition("/")[2] for path in chaos.find(root))
    assert names == ["a", "b", "d"]
    assert sorted(chaos.ls(root, detail=False)) == sorted(target.ls(root, detail=False))
    chaos.rm(root, recursive=True)
    assert target.find(root) == []


def test_files_go_to_and_fro(place: tuple[Any, Any, str], tmp_path: Path) -> None:
    chaos, _, root = place
    (tmp_path / "here").write_bytes(b"local bytes")
    chaos.put_file(str(tmp_path / "here"), f"{root}/there")
    chaos.get_file(f"{root}/there", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == b"local bytes"


def test_it_can_be_pickled(place: tuple[Any, Any, str]) -> None:
    chaos, _, root = place
    chaos.pipe_file(f"{root}/a", b"content")
    assert pickle.loads(pickle.dumps(chaos)).cat_file(f"{root}/a") == b"content"


@pytest.mark.parametrize("error", ["EIO", "ENOSPC", "EACCES", "ETIMEDOUT", "EDQUOT", "EROFS"])
def test_an_operation_is_refused_with_the_errno_and_the_file(
    place: tuple[Any, Any, str], error: str
) -> None:
    chaos, target, root = place
    with (
        striking(f"fail rank=0 at=storage/write error={error}"),
        pytest.raises(OSError, match="injected by the fault") as caught,
    ):
        chaos.pipe_file(f"{root}/a", b"content")
    assert (caught.value.errno, caught.value.filename) == (getattr(errno, error), f"{root}/a")
    assert not target.exists(f"{root}/a")


def test_slow_down_is_what_s3fs_makes_of_a_503(place: tuple[Any, Any, str]) -> None:
    chaos, _, root = place
    with (
        striking("fail rank=0 at=storage/list error=SlowDown"),
        pytest.raises(OSError, match="503 SlowDown") as caught,
    ):
        chaos.ls(root)
    assert caught.value.errno == errno.EBUSY


def test_an_operation_that_took_effect_is_reported_as_failed(place: tuple[Any, Any, str]) -> None:
    chaos, target, root = place
    with striking("fail rank=0 at=storage/write when=after"), pytest.raises(OSError, match="inj"):
        chaos.pipe_file(f"{root}/a", b"content")
    assert target.cat_file(f"{root}/a") == b"content"


def test_a_transient_fault_is_over_and_a_lasting_one_is_not(place: tuple[Any, Any, str]) -> None:
    chaos, _, root = place
    chaos.pipe_file(f"{root}/a", b"content")
    for times, failures in (("1", 1), ("2", 2), ("always", 3)):
        failed = 0
        with striking(f"fail rank=0 at=storage/read nth=2 times={times}"):
            for _ in range(4):
                try:
                    chaos.cat_file(f"{root}/a")
                except OSError:
                    failed += 1
        assert failed == failures


def test_only_files_that_match_the_path_are_counted(place: tuple[Any, Any, str]) -> None:
    chaos, target, root = place
    with striking("lose rank=0 at=storage/write path=*/metadata") as struck:
        for name in ("a", "b", "metadata", "c"):
            chaos.pipe_file(f"{root}/{name}", name.encode())
    assert struck.changes == ["storage/write: acknowledged and lost"]
    found = [name for name in ("a", "b", "metadata", "c") if target.exists(f"{root}/{name}")]
    assert found == ["a", "b", "c"]


def test_a_write_is_torn_and_acknowledged(place: tuple[Any, Any, str]) -> None:
    chaos, target, root = place
    with striking("short rank=0 at=storage/write keep=3 times=always"):
        chaos.pipe_file(f"{root}/a", b"0123456789")
        with chaos.open(f"{root}/b", "wb") as file:
            assert file.write(b"0123456789") == 10
    assert target.cat_file(f"{root}/a") == target.cat_file(f"{root}/b") == b"012"


def test_a_file_is_truncated_or_changed_or_gone_once_it_is_complete(
    place: tuple[Any, Any, str],
) -> None:
    chaos, target, root = place
    schedule = (
        "short rank=0 at=storage/commit path=*/a keep=4; corrupt rank=0 at=storage/commit path=*/b;"
        "lose rank=0 at=storage/commit path=*/c"
    )
    with striking(schedule) as struck:
        for name in "abc":
            with chaos.open(f"{root}/{name}", "wb") as file:
                file.write(bytes(100))
    assert target.cat_file(f"{root}/a") == bytes(4)
    changed = target.cat_file(f"{root}/b")
    assert sum(bin(byte).count("1") for byte in changed) == 1
    assert len(changed) == 100
    assert not target.exists(f"{root}/c")
    assert len(struck.changes) == 3


def test_a_bit_flips_on_reading_and_not_at_rest(place: tuple[Any, Any, str]) -> None:
    chaos, target, root = place
    target.pipe_file(f"{root}/a", bytes(100))
    with striking("corrupt rank=0 at=storage/read times=2"):
        read = chaos.cat_file(f"{root}/a")
        with chaos.open(f"{root}/a", "rb") as file:
            read_again = file.read()
        assert chaos.cat_file(f"{root}/a") == bytes(100)
    for content in (read, read_again):
        assert sum(bin(byte).count("1") for byte in content) == 1
    assert target.cat_file(f"{root}/a") == bytes(100)


def test_content_and_listings_are_those_of_before(place: tuple[Any, Any, str]) -> None:
    chaos, _, root = place
    chaos.pipe_file(f"{root}/a", b"old")
    schedule = (
        "stale rank=0 at=storage/read path=*/a; stale rank=0 at=storage/list nth=2;"
        "stale rank=0 at=storage/read path=*/new; stale rank=0 at=storage/stat path=*/new"
    )
    with striking(schedule) as struck:
        before = chaos.ls(root, detail=False)
        chaos.pipe_file(f"{root}/a", b"younger")
        chaos.pipe_file(f"{root}/new", b"x")
        assert chaos.cat_file(f"{root}/a") == b"old"
        assert chaos.cat_file(f"{root}/a") == b"younger"
        assert chaos.ls(root, detail=False) == before
        assert len(chaos.ls(root, detail=False)) == 2
        with pytest.raises(FileNotFoundError):
            chaos.cat_file(f"{root}/new")
        assert not chaos.exists(f"{root}/new")
        assert chaos.exists(f"{root}/new")
    assert len(struck.changes) == 4


def test_a_late_write_lands_after_others(place: tuple[Any, Any, str]) -> None:
    """So a manifest is visible before its shards."""
    chaos, target, root = place
    with striking("late rank=0 at=storage/write path=*/shard hold=1") as struck:
        chaos.pipe_file(f"{root}/shard", b"shard")
        chaos.pipe_file(f"{root}/manifest", b"manifest")
        assert target.exists(f"{root}/manifest")
        assert not target.exists(f"{root}/shard")
    assert target.cat_file(f"{root}/shard") == b"shard"
    assert [record["change"] for record in struck.records if record["kind"] == "late"] == [
        "carried out late"
    ]


def test_a_deletion_is_acknowledged_and_lost(place: tuple[Any, Any, str]) -> None:
    chaos, target, root = place
    target.pipe_file(f"{root}/a", b"x")
    with striking("lose rank=0 at=storage/delete"):
        chaos.rm_file(f"{root}/a")
    assert target.exists(f"{root}/a")


def test_delays_and_bandwidth_are_recorded(place: tuple[Any, Any, str]) -> None:
    chaos, _, root = place
    schedule = "delay rank=0 at=storage/write seconds=0.01; slow rank=0 at=storage/read rate=1000"
    with striking(schedule) as struck:
        chaos.pipe_file(f"{root}/a", b"0123456789")
        chaos.cat_file(f"{root}/a")
    assert struck.changes == [
        "storage/write: 0.01 s late",
        "storage/read: 10 bytes at 1000 a second",
    ]


def test_operations_are_counted_by_kind(place: tuple[Any, Any, str]) -> None:
    chaos, _, root = place
    with striking("fail rank=0 at=storage/publish") as struck:
        with chaos.open(f"{root}/a", "wb") as file:
            file.write(b"x")
            file.write(b"y")
        chaos.cat_file(f"{root}/a")
        chaos.rm_file(f"{root}/a")
    (counted,) = [record["counts"] for record in struck.records if record["kind"] == "operations"]
    assert counted == {
        "storage/create": 1,
        "storage/write": 2,
        "storage/commit": 1,
        "storage/read": 1,
        "storage/delete": 1,
    }


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("short rank=0 at=storage/write keep=99", "1 of 1 bytes written"),
        ("corrupt rank=0 at=storage/read path=*/empty", "there were no bytes"),
    ],
)
def test_what_could_change_nothing_is_said(
    place: tuple[Any, Any, str], fault: str, said: str
) -> None:
    chaos, _, root = place
    with striking(fault) as struck:
        chaos.pipe_file(f"{root}/a", b"x")
        chaos.pipe_file(f"{root}/empty", b"")
        chaos.cat_file(f"{root}/empty")
    (record,) = [record for record in struck.records if record["kind"] == "operation"]
    assert (record["change"], record["changed"]) == (said, False)


def test_a_download_in_one_call_shows_no_bytes_and_says_so(bucket: Any, tmp_path: Path) -> None:
    chaos, path = fsspec.filesystem("chaos", fs=bucket), f"{BUCKET}/{secrets.token_hex(8)}"
    chaos.pipe_file(path, b"content")
    with striking("corrupt rank=0 at=storage/read") as struck:
        chaos.get_file(path, str(tmp_path / "x"))
    assert struck.changes == ["storage/read: no bytes pass in it"]
    assert (tmp_path / "x").read_bytes() == b"content"


def test_text_and_transactions_pass_through(place: tuple[Any, Any, str]) -> None:
    chaos, target, root = place
    with chaos.open(f"{root}/text", "w") as file:
        file.write("one\ntwö\n")
    with chaos.open(f"{root}/text", "r") as file:
        assert file.readlines() == ["one\n", "twö\n"]
    with chaos.transaction:
        with chaos.open(f"{root}/later", "wb") as file:
            file.write(b"x")
        assert not target.exists(f"{root}/later")
    assert target.cat_file(f"{root}/later") == b"x"


def test_a_multipart_upload_whose_completion_is_lost_is_left_behind(
    server: S3Server, bucket: Any
) -> None:
    chaos, key = fsspec.filesystem("chaos", fs=bucket), f"{secrets.token_hex(8)}/big"
    with (
        striking("lose rank=0 at=storage/commit") as struck,
        chaos.open(f"{BUCKET}/{key}", "wb", block_size=5 << 20) as file,
    ):
        file.write(bytes(6 << 20))
        file.write(bytes(5 << 20))
    assert struck.changes == ["storage/commit: acknowledged and lost"]
    client = server.client()
    # Other tests may have left their own in the bucket.
    uploads = client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    (upload,) = (each for each in uploads if each["Key"] == key)
    assert not bucket.exists(f"{BUCKET}/{key}")
    client.abort_multipart_upload(Bucket=BUCKET, Key=key, UploadId=upload["UploadId"])


def test_an_asynchronous_caller_is_struck_as_well(tmp_path: Path) -> None:
    target = AsyncFileSystemWrapper(fsspec.filesystem("file"), asynchronous=True)
    chaos = fsspec.filesystem("chaos", fs=target, asynchronous=True)

    async def use() -> None:
        await chaos._pipe_file(f"{tmp_path}/a", b"0123456789")
        await chaos._pipe_file(f"{tmp_path}/b", b"0123456789")
        with pytest.raises(OSError, match="injected"):
            await chaos._cat_file(f"{tmp_path}/a")

    with striking("short rank=0 at=storage/write keep=3; fail rank=0 at=storage/read"):
        asyncio.run(use())
    assert (tmp_path / "a").read_bytes() == b"012"
    assert (tmp_path / "b").read_bytes() == b"0123456789"


def test_a_chain_is_opened_by_its_url(tmp_path: Path) -> None:
    with fsspec.open(f"chaos::file://{tmp_path}/a", "wb") as file:
        file.write(b"x")
    assert (tmp_path / "a").read_bytes() == b"x"
    with striking("fail rank=0 at=storage/stat"), pytest.raises(OSError, match="injected"):
        fsspec.open(f"chaos::file://{tmp_path}/a", "rb").open()
