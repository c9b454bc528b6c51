"""Whatever shards, object files and notes hold, reading ends in a clear error or in what was saved.

Object files that are changed here have right digests, so only the checks behind the digests protect
the reader. Not covered: files that change while they are read, and sparse files that are really as
large as they claim."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

from seatrial.recovery import CheckpointStore, SeatrialReader, plain
from seatrial.recovery.digest import digest
from seatrial.recovery.directory import CheckpointDirectory
from seatrial.recovery.errors import ManifestError

from ..dcp_calls import dcp
from .checkpoints import JSON_VALUES, body_of, fuzz, read_everything, reseal

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@fuzz
@given(value=JSON_VALUES)
@example(value={"$": "torch.tensor", "value": "", "dtype": "float32", "shape": [0, 10**30]})
@example(value={"$": "numpy.array", "value": "", "dtype": "<f8", "shape": [0, 10**30]})
@example(value={"$": ["int"], "value": 1})
@example(value={"$": "set", "value": [[]]})
def test_any_json_is_plain_data_or_an_error(value: object) -> None:
    content = json.dumps(value).encode()
    with suppress(ManifestError):
        plain.loads(content)


@fuzz
@given(content=st.binary(max_size=50))
@example(content=pickle.dumps({"shared": {}, "rank": {}}))
@example(content=b"[" * 100_000)
@example(content=b"[" * 900 + b"]" * 900)
@example(content=b"9" * 10_000)
@example(content=b"NaN")
def test_any_bytes_are_plain_data_or_an_error(content: bytes) -> None:
    with suppress(ManifestError):
        plain.loads(content)


def test_a_planner_s_data_is_no_way_to_run_code(root: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(root / "exploded"),)

    fields = body_of(root, 2)
    (path,) = (root / "store/step-00000002").glob("attempt-*/*.json")
    content = pickle.dumps(Bomb())
    path.write_bytes(content)
    fields["objects"][0].update(size=len(content), digest=digest(content))
    reseal(root, 2, fields)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"value": {"lr": None}}, storage_reader=SeatrialReader(root / "store", step=2))
    assert isinstance(caught.value.failures[0][0], ManifestError)
    assert not (root / "exploded").exists()


@settings(fuzz, max_examples=60)
@given(data=st.data(), step=st.sampled_from([1, 2]))
def test_a_changed_file_is_found_by_every_reader(
    root: Path, make_state: Any, data: Any, step: int
) -> None:
    files = sorted((root / f"store/step-{step:08d}").glob("attempt-*/*"))
    path = data.draw(st.sampled_from(files))
    content = path.read_bytes()
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, min(len(content), start + 40)))
    changed = content[:start] + data.draw(st.binary(max_size=40)) + content[end:]
    path.write_bytes(changed)
    try:
        found = read_everything(root, make_state)
        assert any(path.name in text for text in found) == (changed != content)
    finally:
        path.write_bytes(content)


@settings(fuzz, max_examples=60)
@given(value=JSON_VALUES, inside=st.sampled_from(["", "shared", "rank", "items"]))
def test_sealed_object_files_of_any_content_are_read_or_refused(
    root: Path, pristine: Path, make_state: Any, value: object, inside: str
) -> None:
    for step in (1, 2):
        (path,) = (root / f"store/step-{step:08d}").glob("attempt-*/*.json")
        fields: dict[str, object] = {"shared": {}, "rank": {}, "items": {}}
        content = json.dumps(fields | {inside: value} if inside else value).encode()
        path.write_bytes(content)
        body = body_of(pristine, step)
        body["objects"][0].update(size=len(content), digest=digest(content))
        reseal(root, step, body)
    read_everything(root, make_state)


# Links and other things that are no files


def to_secret(path: Path, root: Path) -> None:
    path.unlink()
    path.symlink_to(root / "secret")


def to_itself(path: Path, root: Path) -> None:
    path.rename(root / "moved")
    path.symlink_to(root / "moved")


def to_pipe(path: Path, root: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("replace", [to_secret, to_itself, to_pipe])
@pytest.mark.parametrize(
    "pattern", ["manifest.json", "attempt-*/*.json", "attempt-*/*.safetensors"]
)
def test_what_is_no_regular_file_is_refused_and_nothing_waits_for_it(
    root: Path, make_state: Any, pattern: str, replace: Callable[[Path, Path], None]
) -> None:
    for path in (root / "store").glob(f"step-*/{pattern}"):
        replace(path, root)
        break
    assert read_everything(root, make_state)


@pytest.mark.parametrize("pattern", ["step-00000002", "step-00000002/attempt-*"])
def test_a_directory_that_is_a_link_is_refused(root: Path, make_state: Any, pattern: str) -> None:
    (path,) = (root / "store").glob(pattern)
    to_itself(path, root)
    assert read_everything(root, make_state)


@pytest.mark.parametrize("replace", [to_secret, to_pipe])
def test_a_note_of_verification_that_is_no_regular_file_vouches_for_nothing(
    root: Path, replace: Callable[[Path, Path], None]
) -> None:
    store = CheckpointStore(root / "store")
    assert store.verify(2) == []
    replace(root / "store/step-00000002/verified.json", root)
    assert CheckpointDirectory.at(root / "store").verified_attempt(2) is None


@pytest.mark.parametrize("content", [b"[" * 100_000, b"{}", b"3", b'{"attempt":3}', b"\xff"])
def test_a_note_of_verification_of_any_content_vouches_for_nothing(
    root: Path, content: bytes
) -> None:
    (root / "store/step-00000002/verified.json").write_bytes(content)
    assert CheckpointDirectory.at(root / "store").verified_attempt(2) is None
