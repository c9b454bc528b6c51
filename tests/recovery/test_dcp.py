"""`torch.distributed.checkpoint` on the manifest store, in one process: what comes back.

Models are in `test_dcp_models`, what is refused in `test_dcp_refusals`, publishing in
`test_dcp_publish`, several ranks in `test_dcp_ranks`."""

from __future__ import annotations

import io
import math
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from seatrial.recovery import (
    CheckpointStore,
    SeatrialReader,
    SeatrialWriter,
    inspect_store,
)

from .dcp_calls import bits, dcp, load, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(6, 10, generator=generator)
    noise = torch.randint(0, 255, (64,), dtype=torch.uint8, generator=generator)
    return {
        "matrix": base.clone(),
        "zero-dim": torch.tensor(seed * 0.1),
        "one": torch.tensor([seed]),
        "empty": torch.empty(0, 3),
        "empty-flat": torch.empty(0, dtype=torch.int16),
        "mask": base > 0,
        "half": base.half(),
        "brain": base.bfloat16(),
        "double": base.double(),
        "complex": torch.complex(base, base.flip(0)),
        "complex-wide": torch.complex(base.double(), base.double()),
        "float8": noise.clone().view(torch.float8_e4m3fn),
        "float8-5": noise.clone().view(torch.float8_e5m2),
        "float8-fnuz": noise.clone().view(torch.float8_e4m3fnuz),
        "words": noise.clone().view(torch.uint16),
        "transposed": base.clone().t(),
        "sliced": base.clone()[1::2, ::3],
        "permuted": torch.randn(2, 3, 4, generator=generator).permute(2, 0, 1),
        "conjugate": torch.complex(base, base.flip(0)).conj(),
        "expanded": torch.randn(4, 1, generator=generator).expand(4, 5),
        "nan": torch.tensor([math.nan, -0.0, math.inf]),
    }


def test_tensors_of_every_kind_come_back_bitwise(directory: Path) -> None:
    save(tensors(1), directory)
    target = tensors(2)
    target["expanded"] = target["expanded"].clone()  # its elements share memory: no destination
    load(target, directory)
    for name, tensor in tensors(1).items():
        assert bits(target[name]) == bits(tensor), name
    assert inspect_store(directory).latest_valid == 1


def test_the_live_tensors_are_filled_in_place(directory: Path) -> None:
    save(tensors(1), directory)
    model = torch.nn.Linear(10, 6, bias=False)
    parameter = model.weight
    load({"matrix": parameter}, directory)
    assert model.weight is parameter
    assert bits(model.weight) == bits(tensors(1)["matrix"])


VALUES: dict[str, Any] = {
    "int": 3,
    "huge": 1 << 200,
    "float": 0.1,
    "inf": -math.inf,
    "none": None,
    "flag": True,
    "text": "é\ud800",
    "raw": b"\x00\xff",
    "pair": (0.9, (1, None)),
    "ordered": OrderedDict(b=1, a=2),
    "set": {1, 2},
    "numbers": ({1: "one"},),
    "array": np.arange(3.0),
    "empty list": [],
}


def test_values_that_are_no_tensors_come_back_equal(directory: Path) -> None:
    save({"nested": VALUES, "top": 5}, directory)
    # DCP takes dictionaries and lists apart, so the target has to have them.
    nested = dict.fromkeys(VALUES) | {"ordered": OrderedDict(b=0, a=0)}
    state = load({"nested": nested, "top": None}, directory)
    assert state["top"] == 5
    array = state["nested"].pop("array")
    assert array.dtype == np.float64
    assert array.tolist() == [0.0, 1.0, 2.0]
    expected = {name: value for name, value in VALUES.items() if name != "array"}
    assert repr(state["nested"]) == repr(expected)


def test_a_stream_of_bytes_comes_back_whole(directory: Path) -> None:
    stream = io.BytesIO(b"opaque")
    stream.seek(3)
    save({"extra": stream}, directory)
    found = load({"extra": io.BytesIO()}, directory)["extra"]
    assert found.getvalue() == b"opaque"


def test_nothing_that_is_stored_is_a_pickle(directory: Path) -> None:
    save({"nested": VALUES} | tensors(1), directory)
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert sorted(path.name for path in files) == [
        "manifest.json",
        "rank-00000.json",
        "rank-00000.safetensors",
    ]
    assert not any(zipfile.is_zipfile(path) for path in files)  # what torch.save writes


class Halving(DefaultSavePlanner):
    """A planner that saves in half precision, as PyTorch's documentation shows."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        item = super().resolve_data(write_item)
        return item.half() if isinstance(item, torch.Tensor) else item


def test_a_planner_that_changes_what_is_saved_is_followed(directory: Path) -> None:
    save({"w": torch.full((3,), 0.5), "v": [0.25]}, directory, planner=Halving())
    state = load({"w": torch.zeros(3, dtype=torch.float16), "v": [None]}, directory)
    assert state["w"].tolist() == [0.5] * 3
    assert state["v"] == [0.25]


def test_the_newest_step_is_loaded_unless_another_is_asked_for(directory: Path) -> None:
    for step in (1, 2, 3):
        save({"w": torch.tensor(float(step))}, directory, step=step)
    assert load({"w": torch.tensor(0.0)}, directory)["w"] == 3
    assert load({"w": torch.tensor(0.0)}, directory, step=2)["w"] == 2


def test_the_store_s_tools_read_what_dcp_saved(directory: Path, make_state: Any) -> None:
    state = make_state(1)
    writer = SeatrialWriter(
        directory, step=7, parent_step=3, topology="dp1", writer={"host": "a"}, run={"code": "b"}
    )
    dcp.save(dict(state.live), storage_writer=writer)
    store = CheckpointStore(directory)
    assert store.latest() == 7
    assert store.verify(7) == []
    restored = store.restore(target := make_state(2))
    assert restored is not None
    assert all(torch.equal(target.live[name], state.live[name]) for name in state.live)
    manifest = restored.manifest
    assert (manifest.parent_step, manifest.topology) == (3, "dp1")
    assert manifest.writer["host"] == "a"
    assert manifest.run == {"code": "b"}
    assert target.loaded == ({}, {0: {}}, 0)


def test_a_state_dict_is_rebuilt_from_the_checkpoint_alone(directory: Path) -> None:
    """What `torch.distributed.checkpoint.format_utils` does to convert a checkpoint."""
    save(
        {"model": {"w": torch.ones(2)}, "meta": {"lr": 0.5, "list": [torch.zeros(1), 3]}}, directory
    )
    state: dict[str, Any] = {}
    _load_state_dict(
        state,
        storage_reader=SeatrialReader(directory),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    assert state["model"]["w"].tolist() == [1, 1]
    assert state["meta"]["lr"] == 0.5
    assert state["meta"]["list"][1] == 3
