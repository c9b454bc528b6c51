"""Checkpoints whose digests are right and whose contents are not, and every way to read them.

Whatever a reader is given, it ends in one of this project's errors or in what was saved, and no
error shows what a file beside the store holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

from seatrial.recovery import CheckpointStore, SeatrialReader, inspect_store
from seatrial.recovery.digest import digest
from seatrial.recovery.directory import CheckpointDirectory
from seatrial.recovery.errors import RecoveryError
from seatrial.recovery.inspect import step_problems

from ..dcp_calls import dcp

SECRET = b"launch code"

# What an exception that is none of ours looks like in the text that other ranks get.
FOREIGN = re.compile(r"rank 0: (?!OSError)\w+(Error|Exception): ")

fuzz = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

TAGS: tuple[str, ...] = (
    *("int", "float", "str", "bytes", "BytesIO", "tuple", "set", "frozenset", "dict"),
    *("OrderedDict", "numpy.array", "numpy.scalar", "torch.tensor"),
)
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 1 << 31, 1 << 62, 1 << 63, 10**400, 0, 1])
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["../x", "/etc/passwd", "a/b", "", ".", "rank-00000.json", digest(b"")]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3) | st.just("$"), inner, max_size=3)
        | st.fixed_dictionaries(
            {
                "$": st.sampled_from(TAGS),
                "value": inner | st.sampled_from(["", "AAAA", "0x10", "AAAAAAAAAAA="]),
            },
            optional={
                "dtype": st.sampled_from(
                    ["<f8", "|b1", "<U1", "|S3", "|O", "float32", "bool", "<M8[D]", "object"]
                ),
                "shape": st.lists(st.sampled_from([-1, 0, 1, 2, 1 << 62, 10**30]), max_size=3),
            },
        )
    ),
    max_leaves=10,
)


def body_of(root: Path, step: int) -> dict[str, Any]:
    content = (root / f"store/step-{step:08d}/manifest.json").read_bytes()
    fields: dict[str, Any] = json.loads(content)["manifest"]
    return fields


def sealed(body: bytes) -> bytes:
    return b'{"digest":"%s","manifest":' % digest(body).encode() + body + b"}\n"


def reseal(root: Path, step: int, fields: object) -> None:
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    (root / f"store/step-{step:08d}/manifest.json").write_bytes(sealed(body))


def read_everything(root: Path, make_state: Any) -> list[str]:
    """Every way to read a store; the errors that came, all of them ours."""
    store = root / "store"
    found = []
    inspect_store(store)
    for step in (1, 2):
        found += step_problems(CheckpointDirectory.at(store), step)
        state = make_state(5)
        if step == 2:
            state.live = {"a": torch.zeros(6), "b": torch.zeros(6)}
        try:
            CheckpointStore(store).restore(state, step=step)
        except RecoveryError as error:
            found.append(str(error))
        target: dict[str, Any] = dict(state.live)
        if step == 2:
            target["value"] = {"lr": None}
        try:
            SeatrialReader(store, step=step).read_metadata()
            dcp.load(target, storage_reader=SeatrialReader(store, step=step))
        except RecoveryError as error:
            found.append(str(error))
        except CheckpointException as error:
            cause, _ = error.failures[0]
            # DCP itself looks for names and compares shapes.
            fits = not str(cause).startswith(("Missing key in", "Size mismatch between"))
            assert isinstance(cause, RecoveryError) or not fits, repr(cause)
            found.append(str(cause))
    for text in found:
        assert SECRET.decode() not in text
        assert not FOREIGN.search(text), text
    return found
