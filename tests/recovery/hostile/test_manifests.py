"""Whatever bytes a manifest consists of, reading it ends in a clear error or in what was saved.

Hostile manifests are re-sealed: their digests are right, so only the checks behind the digests
protect the reader. Not covered: files that change while they are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seatrial.recovery import Manifest
from seatrial.recovery.errors import RecoveryError

from .checkpoints import JSON_VALUES, body_of, fuzz, read_everything, reseal, sealed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@fuzz
@given(content=st.binary(max_size=300))
def test_any_bytes_are_no_manifest(content: bytes) -> None:
    for candidate in (content, sealed(content)):
        with pytest.raises(RecoveryError):
            Manifest.from_bytes(candidate)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 10_000,
        b'{"format":"seatrial-checkpoint","version":1}',
        b'{"format":"seatrial-checkpoint","version":' + b"9" * 5000 + b"}",
        b"\xff\xfe",
        b"null",
    ],
)
def test_a_sealed_body_that_is_no_manifest_is_refused(body: bytes) -> None:
    with pytest.raises(RecoveryError):
        Manifest.from_bytes(sealed(body))


def test_deeply_nested_free_data_is_refused(root: Path, pristine: Path, make_state: Any) -> None:
    for depth in (900, 1_000, 5_000):
        fields = json.dumps(body_of(pristine, 2) | {"run": "HERE"})
        body = fields.replace('"HERE"', '{"x":' + "[" * depth + "]" * depth + "}")
        reseal(root, 2, body.encode())
        assert read_everything(root, make_state)


def places(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to everything inside of JSON."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from places(item, (*path, index))


def put(fields: Any, path: tuple[Any, ...], value: object) -> None:
    for key in path[:-1]:
        fields = fields[key]
    fields[path[-1]] = value


@settings(fuzz, max_examples=80)
@given(data=st.data(), step=st.sampled_from([1, 2]), value=JSON_VALUES)
def test_a_manifest_with_any_value_in_any_place_is_read_or_refused(
    root: Path, pristine: Path, make_state: Any, data: Any, step: int, value: object
) -> None:
    fields = body_of(pristine, step)
    path = data.draw(st.sampled_from(list(places(fields))))
    put(fields, path, value)
    reseal(root, step, fields)
    read_everything(root, make_state)
    reseal(root, step, body_of(pristine, step))


@settings(fuzz, max_examples=80)
@given(data=st.data(), step=st.sampled_from([1, 2]))
def test_a_manifest_with_parts_exchanged_is_read_or_refused(
    root: Path, pristine: Path, make_state: Any, data: Any, step: int
) -> None:
    """Values of the right type in the wrong place, which is closer to being accepted."""
    fields = body_of(pristine, step)
    paths = list(places(fields))
    for _ in range(data.draw(st.integers(1, 3))):
        source, target = data.draw(st.sampled_from(paths)), data.draw(st.sampled_from(paths))
        value: Any = body_of(pristine, step)
        for key in source:
            value = value[key]
        try:
            put(fields, target, value)
        except (KeyError, IndexError, TypeError):
            continue  # its place was overwritten before
    reseal(root, step, fields)
    read_everything(root, make_state)
    reseal(root, step, body_of(pristine, step))


Change = Callable[[dict[str, Any]], object]


def chunk(fields: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = fields["tensors"][0]["chunks"][0]
    return found


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["objects"][0].update(name="../../../secret"),
        lambda m: m["objects"][0].update(name="/etc/passwd"),
        lambda m: m["shards"][0].update(name=".."),
        lambda m: chunk(m).update(file="../secret"),
        lambda m: m.update(attempt=".."),
        lambda m: m.update(attempt="attempt-/../.."),
        lambda m: m.update(attempt="attempt-x\n"),
        lambda m: m["objects"][0].update(size=1 << 62),
        lambda m: m["shards"][0].update(size=1 << 62),
        lambda m: m["shards"][0].update(size=1 << 62, header=1 << 61),
        lambda m: m["tensors"][0].update(shape=[1 << 40, 1 << 22]),
        lambda m: chunk(m).update(length=1 << 62),
        lambda m: m["writer"].update({"torch.distributed.checkpoint": 3}),
        lambda m: m["writer"].update({"torch.distributed.checkpoint": {"items": {"value": 7}}}),
        lambda m: m["writer"].update({"torch.distributed.checkpoint": {"items": {"a": 0}}}),
        lambda m: m["writer"].update({"torch.distributed.checkpoint": {"items": [["a"]]}}),
    ],
)
def test_a_hostile_claim_is_refused_and_nothing_large_is_allocated(
    root: Path, make_state: Any, change: Change
) -> None:
    fields = body_of(root, 2)
    change(fields)
    reseal(root, 2, fields)
    # An allocation by the claim would be refused by the system: MemoryError is no clear error.
    assert [text for text in read_everything(root, make_state) if text]
