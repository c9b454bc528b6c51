"""Places of checkpoints that are not what they seem: links, files, paths that were URLs.

None is ever taken for an empty place, from which a job would start anew."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seatrial.recovery import CheckpointStore
from seatrial.recovery import __main__ as command
from seatrial.recovery.errors import CheckpointError, SaveError
from seatrial.recovery.probe import interpose, listen


@pytest.fixture
def synced() -> Iterator[list[str]]:
    """The files and directories that are fsynced."""
    seen: list[str] = []

    class Watch:
        def perform(self, event: str, do: Any, data: Any, lost: Any, facts: Any) -> Any:
            if event == "storage/sync":
                seen.append(facts["file"])
            return do(data)

    stop = interpose(Watch())
    yield seen
    stop()


def test_a_directory_may_be_a_symbolic_link(
    tmp_path: Path, make_state: Any, same_tensors: Any
) -> None:
    (tmp_path / "large disk").mkdir()
    (tmp_path / "link").symlink_to("large disk")
    store = CheckpointStore(tmp_path / "link", keep_last=1)
    for step in (1, 2, 3):
        store.save(make_state(step), step=step)
        state = make_state(0)
        assert store.restore(state).step == step  # type: ignore[union-attr]
        assert same_tensors(state, make_state(step))
    (damaged,) = (tmp_path / "large disk" / "step-00000003").glob("attempt-*/*.safetensors")
    damaged.write_bytes(b"")
    assert store.list()[-1].step == 3
    assert CheckpointStore(tmp_path / "large disk").latest() == 3
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.write_text("x"), "is no directory"),
        (lambda path: path.symlink_to("not-mounted"), "is a symbolic link to no directory"),
    ],
)
def test_what_is_no_directory_is_no_empty_one(
    tmp_path: Path, make_state: Any, make: Any, said: str
) -> None:
    make(tmp_path / "store")
    store = CheckpointStore(tmp_path / "store")
    with pytest.raises(CheckpointError, match=said):
        store.latest()
    with pytest.raises(CheckpointError, match=said):
        store.restore(make_state(1))
    with pytest.raises(SaveError, match=said):
        store.save(make_state(1), step=1)


@pytest.mark.parametrize("location", [Path("s3://bucket/run"), "s3:/bucket/run", "gs:/b"])
def test_a_url_that_was_made_a_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="looks like a URL that was made a path"):
        CheckpointStore(location)


def test_directories_of_a_first_attempt_that_was_killed_are_made_durable_by_the_next(
    tmp_path: Path, make_state: Any, synced: list[str]
) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)  # by whom was killed before any fsync
    published: list[int] = []

    def link(event: str, edge: str, _: dict[str, object]) -> None:
        if (event, edge) == ("checkpoint/manifest/link", "before"):
            published.append(len(synced))

    stop = listen(link)
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    store.save(make_state(1), step=1)
    before = synced[: published[0]]
    assert {str(tmp_path / "run"), str(tmp_path)} <= set(before)
    synced.clear()
    CheckpointStore(tmp_path / "run" / "checkpoints").save(make_state(2), step=2)
    stop()
    assert str(tmp_path) not in synced  # what is published there was durable


def test_a_directory_that_may_not_be_written_is_told_by_its_permissions(
    tmp_path: Path, make_state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SaveError, match="Permission denied") as caught:
        CheckpointStore(tmp_path).save(make_state(1), step=1)
    assert "hard links" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


class ReadOnly:
    """Nothing can be created, written or renamed any more."""

    def perform(self, event: str, do: Any, data: Any, lost: Any, facts: Any) -> Any:
        if event in ("storage/create", "storage/write", "storage/rename", "storage/delete"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), facts["file"])
        return do(data)


def test_what_may_not_be_written_can_be_verified(
    tmp_path: Path, make_state: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    store = CheckpointStore(tmp_path / "snapshot")
    store.save(make_state(1), step=1)
    store.save(make_state(2), step=2)
    stop = interpose(ReadOnly())
    with pytest.warns(RuntimeWarning, match="could not be noted that step 2 is verified"):
        assert store.verify(2) == []
    assert command.main(["verify", str(tmp_path / "snapshot")]) == 0
    stop()
    printed = capsys.readouterr()
    assert "step 1: " in printed.out
    assert "step 2: " in printed.out
    assert "Read-only file system" in printed.err
    assert not store.list()[1].verified


def test_what_others_keep_under_the_name_of_a_step_is_not_deleted(
    tmp_path: Path, make_state: Any
) -> None:
    theirs = tmp_path / "step-00001000" / "model.pt"
    theirs.parent.mkdir()
    theirs.write_bytes(b"precious")
    (tmp_path / ".trash-of-mine").mkdir()
    (tmp_path / "step-00000500").mkdir()  # as an attempt that has just begun leaves it
    store = CheckpointStore(tmp_path)
    store.save(make_state(1), step=1)
    store.restore(make_state(0))
    store.prune()
    assert theirs.read_bytes() == b"precious"
    kept = [".trash-of-mine", "step-00000001", "step-00001000"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
