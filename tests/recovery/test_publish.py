"""Publishing is exclusive, all or nothing, and recognises its own success."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from seatrial.recovery.errors import AlreadyPublishedError, StorageUnsupportedError
from seatrial.recovery.probe import listen
from seatrial.recovery.publish import open_directory, probe_publish, publish_at, publish_once


def test_a_published_file_holds_the_data_and_leaves_nothing_else(tmp_path: Path) -> None:
    assert publish_once(tmp_path / "name", b"data") == "won"
    assert (tmp_path / "name").read_bytes() == b"data"
    assert os.listdir(tmp_path) == ["name"]


def test_the_same_content_again_is_ours(tmp_path: Path) -> None:
    publish_once(tmp_path / "name", b"data")
    assert publish_once(tmp_path / "name", b"data") == "ours"


def test_other_content_has_lost_and_changes_nothing(tmp_path: Path) -> None:
    publish_once(tmp_path / "name", b"first")
    with pytest.raises(AlreadyPublishedError):
        publish_once(tmp_path / "name", b"second")
    assert (tmp_path / "name").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["name"]


@pytest.mark.parametrize("published", [True, False])
def test_whose_temporary_was_collected_has_lost_only_if_somebody_won(
    tmp_path: Path, published: bool
) -> None:
    def collect(event: str, edge: str, facts: dict[str, object]) -> None:
        if (event, edge) == ("publish/link", "before"):
            stop()
            for path in tmp_path.glob(".*.tmp"):
                path.unlink()
            if published:
                publish_once(tmp_path / "name", b"first")

    stop = listen(collect)
    with pytest.raises(AlreadyPublishedError if published else FileNotFoundError):
        publish_once(tmp_path / "name", b"second")
    assert os.listdir(tmp_path) == (["name"] if published else [])


def test_of_many_racing_publishers_exactly_one_wins(tmp_path: Path) -> None:
    def publish(number: int) -> bool:
        try:
            return publish_once(tmp_path / "name", b"%d" % number) == "won"
        except AlreadyPublishedError:
            return False

    with ThreadPoolExecutor(8) as pool:
        wins = list(pool.map(publish, range(40)))
    assert wins.count(True) == 1
    assert (tmp_path / "name").read_bytes() == b"%d" % wins.index(True)


def test_a_success_whose_reply_was_lost_is_won(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def link_and_lose_the_reply(*args: Any, **options: Any) -> None:
        link(*args, **options)
        raise FileExistsError

    monkeypatch.setattr(os, "link", link_and_lose_the_reply)
    assert publish_once(tmp_path / "name", b"data") == "won"


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, bytes(data)[:3]))
    publish_once(tmp_path / "name", b"0123456789")
    assert (tmp_path / "name").read_bytes() == b"0123456789"


def test_the_content_is_durable_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, announcements: list[tuple[str, str, dict[str, object]]]
) -> None:
    publish_once(tmp_path / "name", b"data", event="x")
    assert [event for event, edge, _ in announcements if edge == "after"] == [
        "x/write",
        "x/fsync",
        "x/link",
        "x/directory",
    ]


@pytest.mark.parametrize("name", ["write", "fsync", "link"])
def test_a_failure_before_the_link_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, name, fail)
    with pytest.raises(OSError, match="No space left"):
        publish_once(tmp_path / "name", b"data")
    assert os.listdir(tmp_path) == []


def test_a_directory_that_was_replaced_is_not_published_into(tmp_path: Path) -> None:
    directory = tmp_path / "step"
    directory.mkdir()
    with open_directory(directory) as descriptor:
        directory.rename(tmp_path / "trash")
        directory.mkdir()
        publish_at(descriptor, directory / "name", b"zombie")
        assert os.listdir(directory) == []
        os.unlink(tmp_path / "trash/name")
        (tmp_path / "trash").rmdir()
        with pytest.raises(FileNotFoundError):
            publish_at(descriptor, directory / "name", b"zombie")


def test_a_symlink_to_a_directory_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to("real")
    with pytest.raises(OSError, match="alias"):
        publish_once(tmp_path / "alias/name", b"data")


def test_a_file_system_with_exclusive_links_is_accepted_and_left_clean(tmp_path: Path) -> None:
    probe_publish(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["no links", "copies", "replaces"])
def test_a_file_system_without_exclusive_links_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    link: Callable[..., None] = os.link

    def broken(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        if kind == "no links":
            raise PermissionError(1, "Operation not permitted")
        if kind == "copies":
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, dir_fd=dst_dir_fd))
            return
        try:
            link(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        except FileExistsError:
            return

    monkeypatch.setattr(os, "link", broken)
    with pytest.raises(StorageUnsupportedError, match="exactly once"):
        probe_publish(tmp_path)
    assert os.listdir(tmp_path) == []
