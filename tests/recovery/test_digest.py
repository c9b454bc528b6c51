"""Both digests are written and read, each is named in the manifest, and a lack says what to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

from seatrial.recovery import (
    CheckpointStore,
    Manifest,
    SeatrialReader,
    SeatrialWriter,
    inspect_store,
)
from seatrial.recovery.digest import Digest, digest, is_digest
from seatrial.recovery.errors import CheckpointError, DamagedCheckpointError, ManifestError

dcp: Any = torch.distributed.checkpoint  # it exports nothing explicitly

KNOWN = {
    "xxh3_128": "xxh3_128:06b05ab6733a618578af5f94892f3950",
    "blake3": "blake3:6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85",
}


@pytest.fixture
def without_blake3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blake3", None)


@pytest.mark.parametrize("algorithm", KNOWN)
def test_digests_equal_the_published_values_however_the_bytes_are_cut(algorithm: str) -> None:
    assert digest(b"abc", algorithm) == KNOWN[algorithm]
    running = Digest(algorithm)
    for piece in (b"a", b"", b"bc"):
        running.update(piece)
    assert running.text() == KNOWN[algorithm]
    assert is_digest(KNOWN[algorithm])


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "md5:" + "0" * 32,
        "xxh3_128:" + "0" * 64,
        "blake3:" + "0" * 32,
        "blake3:" + "F" * 64,
    ],
)
def test_what_is_no_digest_is_recognised(text: object) -> None:
    assert not is_digest(text)


def test_every_digest_of_a_blake3_checkpoint_is_by_blake3(
    tmp_path: Path, make_state: Any, same_tensors: Any
) -> None:
    store = CheckpointStore(tmp_path, digest="blake3")
    manifest = store.save(make_state(1), step=1)
    content = (store.directory / "step-00000001/manifest.json").read_text()
    assert content.count("blake3:") == 1 + 2 + len(manifest.tensors)
    assert "xxh3_128" not in content
    assert Manifest.from_bytes(content.encode()) == manifest
    assert manifest.to_bytes() == content.encode()
    state = make_state(0)
    assert CheckpointStore(tmp_path).restore(state)  # a reader need not be told
    assert same_tensors(state, make_state(1))
    assert inspect_store(tmp_path).latest_valid == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_every_digest_of_a_dcp_save_is_by_the_algorithm_that_was_asked_for(tmp_path: Path) -> None:
    for step, digests in ((1, {}), (2, {"digest": "blake3"})):
        saved = {"w": torch.full((50,), float(step)), "epoch": step}
        dcp.save(saved, storage_writer=SeatrialWriter(tmp_path, step=step, **digests))
    texts = [(tmp_path / f"step-0000000{n}/manifest.json").read_text() for n in (1, 2)]
    found = [{name: text.count(f"{name}:") for name in KNOWN} for text in texts]
    # The manifest, the header and the tensor of the shard, and the plain data.
    assert found == [{"xxh3_128": 4, "blake3": 0}, {"xxh3_128": 0, "blake3": 4}]
    loaded = {"w": torch.zeros(50), "epoch": 0}
    dcp.load(loaded, storage_reader=SeatrialReader(tmp_path))
    assert (loaded["epoch"], loaded["w"].tolist()) == (2, [2.0] * 50)
    assert inspect_store(tmp_path).latest_valid == 2


def test_one_directory_may_hold_checkpoints_of_both(tmp_path: Path, make_state: Any) -> None:
    CheckpointStore(tmp_path, digest="blake3").save(make_state(1), step=1)
    CheckpointStore(tmp_path).save(make_state(2), step=2)
    assert [step.valid for step in inspect_store(tmp_path).steps] == [True, True]


def test_a_changed_bit_of_a_blake3_checkpoint_is_found_in_every_file(
    tmp_path: Path, make_state: Any
) -> None:
    CheckpointStore(tmp_path, digest="blake3").save(make_state(1), step=1)
    for path in [p for p in tmp_path.rglob("*") if p.is_file()]:
        content = path.read_bytes()
        for position in (0, 20, len(content) // 2, len(content) - 1):
            changed = bytearray(content)
            changed[position] ^= 4
            path.write_bytes(changed)
            assert inspect_store(tmp_path).latest_valid is None, (path.name, position)
            with pytest.raises((DamagedCheckpointError, ManifestError)):
                CheckpointStore(tmp_path).restore(make_state(0), step=1)
        path.write_bytes(content)
    assert inspect_store(tmp_path).latest_valid == 1


def test_a_manifest_that_names_another_algorithm_than_made_its_digest_is_damage(
    tmp_path: Path, make_state: Any
) -> None:
    CheckpointStore(tmp_path).save(make_state(1), step=1)
    path = tmp_path / "step-00000001/manifest.json"
    content = path.read_bytes()
    claimed = json.loads(content)["digest"].replace("xxh3_128:", "blake3:") + "0" * 32
    path.write_bytes(b'{"digest":"' + claimed.encode() + content[content.index(b'","manifest"') :])
    with pytest.raises(ManifestError, match="not whole"):
        Manifest.from_bytes(path.read_bytes())


@pytest.mark.usefixtures("without_blake3")
def test_without_the_package_a_store_that_asks_for_it_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"pip install 'seatrial\[blake3\]'"):
        CheckpointStore(tmp_path, digest="blake3")
    with pytest.raises(CheckpointError, match=r"pip install 'seatrial\[blake3\]'"):
        SeatrialWriter(tmp_path, step=1, digest="blake3")


def test_without_the_package_a_blake3_checkpoint_is_neither_restored_nor_taken_for_damaged(
    tmp_path: Path, make_state: Any, request: pytest.FixtureRequest
) -> None:
    CheckpointStore(tmp_path).save(make_state(1), step=1)
    CheckpointStore(tmp_path, digest="blake3").save(make_state(2), step=2)
    request.getfixturevalue("without_blake3")
    with pytest.raises(CheckpointError, match="need the package 'blake3'") as raised:
        CheckpointStore(tmp_path).restore(make_state(0))
    assert not isinstance(raised.value, (DamagedCheckpointError, ManifestError))
    (_, blake3) = CheckpointStore(tmp_path).list()
    assert "pip install" in str(blake3.problem)
    assert inspect_store(tmp_path).quarantined == ()


def test_an_unknown_digest_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="digest is 'md5'; it must be one of xxh3_128, blake3"):
        CheckpointStore(tmp_path, digest="md5")
    with pytest.raises(ValueError, match="digest is 'md5'; it must be one of xxh3_128, blake3"):
        SeatrialWriter(tmp_path, step=1, digest="md5")
