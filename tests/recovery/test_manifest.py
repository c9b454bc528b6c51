"""A manifest comes back equal, and one that was changed, cut or forged is recognised."""

from __future__ import annotations

import json
import math
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
        lambda m: m["tensors"][0]["chunks"][0].update(length=7),
        lambda m: m["tensors"][0].update(dtype="float64"),
        lambda m: m["tensors"][0].update(dtype="Tensor"),
        lambda m: m["tensors"][0].update(dtype="float31"),
        lambda m: m["shards"][0].update(header=73, size=72),
        lambda m: (m.update(tensors=[]), m["shards"][0].update(header=1 << 40)),
        lambda m: m.update(step=1 << 63),
        lambda m: m.update(step=10.0),
        lambda m: m["tensors"][0].update(chunks=[]),
        lambda m: m["tensors"][0].update(chunks=[3]),
    ],
)
def test_a_manifest_against_the_schema_is_refused(
    manifest: Manifest, change: Callable[[dict[str, Any]], None]
) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_bytes(resealed(manifest, change))


CUT = {"offset": 64, "digest": digest(b"x"), "file": "rank-00000.safetensors"}


def cut(*boxes: tuple[tuple[int, ...], tuple[int, ...]], shape: tuple[int, ...]) -> Any:
    """A change that makes the only tensor one of uint8, stored in ``boxes`` one after the other."""

    def change(fields: dict[str, Any]) -> None:
        offset, chunks = 64, []
        for offsets, sizes in boxes:
            length = math.prod(sizes)
            place = {"offset": offset, "length": length, "offsets": offsets, "sizes": sizes}
            chunks.append(CUT | place)
            offset += length
        fields["shards"][0]["size"] = max(offset, 72)
        fields["tensors"] = [{"name": "w", "dtype": "uint8", "shape": shape, "chunks": chunks}]

    return change


@pytest.mark.parametrize(
    "change",
    [
        cut(((), ()), shape=()),
        cut(((0, 0), (0, 4)), shape=(0, 4)),
        cut(((0, 0), (0, 2)), ((0, 2), (0, 2)), shape=(0, 4)),
        cut(((0,), (3,)), ((3,), (2,)), ((5,), (0,)), shape=(5,)),
        cut(((0, 0), (2, 3)), ((2, 0), (2, 1)), ((2, 1), (2, 2)), shape=(4, 3)),
        # A pinwheel: no line cuts the whole.
        cut(
            ((0, 0), (1, 2)),
            ((0, 2), (2, 1)),
            ((2, 1), (1, 2)),
            ((1, 0), (2, 1)),
            ((1, 1), (1, 1)),
            shape=(3, 3),
        ),
    ],
)
def test_chunks_that_cover_a_tensor_are_accepted(
    manifest: Manifest, change: Callable[[dict[str, Any]], None]
) -> None:
    read = Manifest.from_bytes(resealed(manifest, change))
    assert Manifest.from_bytes(read.to_bytes()) == read


@pytest.mark.parametrize(
    "change",
    [
        cut(((), ()), ((), ()), shape=()),
        cut(((0,), (3,)), ((2,), (2,)), shape=(5,)),
        cut(((0,), (3,)), ((2,), (2,)), ((0,), (0,)), shape=(5,)),
        cut(((0,), (2,)), ((0,), (2,)), shape=(4,)),
        cut(((0, 0), (2, 2)), ((2, 0), (2, 1)), ((1, 1), (2, 1)), shape=(4, 2)),
        cut(((0,) * 30, (1,) * 30), ((0,) * 30, (1,) * 30), shape=(2,) * 30),
        cut(((0,) * 65, (1,) * 65), shape=(1,) * 65),
    ],
)
def test_chunks_with_a_gap_or_an_overlap_are_refused_when_reading_and_when_writing(
    manifest: Manifest, change: Callable[[dict[str, Any]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = resealed(manifest, change)
    with pytest.raises(ManifestError, match="tensor 'w'"):
        Manifest.from_bytes(content)
    with monkeypatch.context() as patch:
        patch.setattr(module, "check_references", lambda manifest: None)
        wrong = Manifest.from_bytes(content)
    with pytest.raises(ManifestError, match="tensor 'w'"):
        wrong.to_bytes()


def second_tensor(**changes: object) -> Any:
    """A change that adds a tensor with the bytes of the first, except for ``changes``."""

    def change(fields: dict[str, Any]) -> None:
        (first,) = fields["tensors"]
        (chunk,) = first["chunks"]
        fields["tensors"].append(first | {"name": "tied", "chunks": [chunk | changes]})
        fields["shards"][0]["size"] += 8

    return change


def test_two_tensors_may_have_the_same_bytes(manifest: Manifest) -> None:
    read = Manifest.from_bytes(resealed(manifest, second_tensor()))
    assert read.tensors[0].chunks == read.tensors[1].chunks


@pytest.mark.parametrize("changes", [{"offset": 68}, {"digest": digest(b"y")}])
def test_bytes_that_belong_to_two_chunks_are_refused(
    manifest: Manifest, changes: dict[str, object]
) -> None:
    with pytest.raises(ManifestError, match="'tied'"):
        Manifest.from_bytes(resealed(manifest, second_tensor(**changes)))


def test_one_tensor_cannot_have_the_same_bytes_twice(manifest: Manifest) -> None:
    def change(fields: dict[str, Any]) -> None:
        (tensor,) = fields["tensors"]
        tensor["shape"] = [4]
        tensor["chunks"] = [tensor["chunks"][0] | {"offsets": [n]} for n in (0, 2)]

    with pytest.raises(ManifestError, match="two different chunks"):
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
