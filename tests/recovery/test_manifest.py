"""A manifest comes back equal, and one that was changed, cut or forged is recognised."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from seatrial.recovery import manifest as module
from seatrial.recovery.digest import digest
from seatrial.recovery.errors import CheckpointError, ManifestError, StateError
from seatrial.recovery.manifest import Chunk, FileEntry, Manifest, ShardEntry, TensorEntry


@pytest.fixture
def manifest() -> Manifest:
    chunk = Chunk(
        file="rank-00000.safetensors",
        offset=64,
        length=8,
        digest=digest(b"x"),
        offsets=(0,),
        sizes=(2,),
    )
    return Manifest(
        step=10,
        parent_step=None,
        attempt="attempt-0123abcd",
        topology="dp1",
        world_size=1,
        writer={"attempt": 3, "host": None},
        run={"lr": float("inf"), "layers": (1, 2)},
        shards=(
            ShardEntry(name="rank-00000.safetensors", size=72, header=64, digest=digest(b"h")),
        ),
        objects=(FileEntry(name="rank-00000.json", size=2, digest=digest(b"{}")),),
        tensors=(TensorEntry(name="w", dtype="float32", shape=(2,), chunks=(chunk,)),),
    )


def resealed(manifest: Manifest, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The manifest's file after ``change``, with a digest that is right again."""
    fields = json.loads(manifest.to_bytes())["manifest"]
    change(fields)
    body = json.dumps(fields).encode()
    return b'{"digest":"%s","manifest":' % digest(body).encode() + body + b"}\n"


def test_a_manifest_comes_back_equal(manifest: Manifest) -> None:
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_a_manifest_is_one_json_document(manifest: Manifest) -> None:
    assert json.loads(manifest.to_bytes())["manifest"]["step"] == 10


def test_any_flipped_bit_is_recognised(manifest: Manifest) -> None:
    content = manifest.to_bytes()
    for position in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(ManifestError, match="not whole"):
            Manifest.from_bytes(bytes(damaged))


def test_any_truncation_is_recognised(manifest: Manifest) -> None:
    content = manifest.to_bytes()
    for length in range(len(content)):
        with pytest.raises(ManifestError, match="not whole"):
            Manifest.from_bytes(content[:length])


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("step"),
        lambda m: m.update(step=-1),
        lambda m: m.update(step=True),
        lambda m: m.update(format="other"),
        lambda m: m.update(attempt="attempt-../x"),
        lambda m: m.update(attempt="quarantine"),
        lambda m: m.update(writer=[]),
        lambda m: m.update(run={"$": "torch.tensor", "value": ""}),
        lambda m: m.update(world_size=2),
        lambda m: m.update(tensors=m["tensors"] * 2),
        lambda m: m["objects"][0].update(name="rank-00000.safetensors"),
        lambda m: m["objects"][0].pop("digest"),
        lambda m: m["objects"][0].update(digest=None),
        lambda m: m["objects"][0].update(digest="md5:00"),
        lambda m: m["shards"][0].update(header="64"),
        lambda m: m["tensors"][0]["chunks"][0].update(digest=""),
        lambda m: m["tensors"][0]["chunks"][0].update(file="rank-00001.safetensors"),
        lambda m: m["tensors"][0]["chunks"][0].update(offset=65),
        lambda m: m["tensors"][0]["chunks"][0].update(offset=0),
        lambda m: m["tensors"][0]["chunks"][0].update(offsets=[1]),
        lambda m: m["tensors"][0]["chunks"][0].update(sizes=[1, 1]),
        lambda m: m["tensors"][0]["chunks"][0].update(sizes=[1]),
        lambda m: m["tensors"][0].update(chunks=[]),
        lambda m: m["tensors"][0].update(chunks=[3]),
    ],
)
def test_a_manifest_against_the_schema_is_refused(
    manifest: Manifest, change: Callable[[dict[str, Any]], None]
) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_bytes(resealed(manifest, change))


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/b", "..", ".hidden", "", "a\0b", 3])
def test_a_file_name_that_leaves_the_directory_is_refused(manifest: Manifest, name: object) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_bytes(resealed(manifest, lambda m: m["objects"][0].update(name=name)))


def test_a_newer_format_is_an_error_and_no_damage(manifest: Manifest) -> None:
    with pytest.raises(CheckpointError, match="format version 2") as caught:
        Manifest.from_bytes(resealed(manifest, lambda m: m.update(version=2)))
    assert not isinstance(caught.value, ManifestError)


def test_a_run_manifest_that_is_not_plain_is_refused_by_path(manifest: Manifest) -> None:
    with pytest.raises(StateError, match=r"run\['data'\]"):
        replace(manifest, run={"data": object()}).to_bytes()


def test_a_manifest_over_the_size_limit_is_refused_when_writing_and_when_reading(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = manifest.to_bytes()
    monkeypatch.setattr(module, "MANIFEST_BYTES_MAX", len(content) - 1)
    with pytest.raises(ManifestError, match="more than"):
        manifest.to_bytes()
    with pytest.raises(ManifestError, match="more than"):
        Manifest.from_bytes(content)
