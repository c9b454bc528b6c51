"""`torch.distributed.checkpoint` on the manifest store, in one process: what comes back, and what
is refused. Several ranks are in `test_dcp_ranks`."""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from seatrial.recovery import (
    CheckpointStore,
    SeatrialReader,
    SeatrialWriter,
    TrainingState,
    inspect_store,
)
from seatrial.recovery import errors as ours
from seatrial.recovery.manifest import Manifest
from seatrial.recovery.probe import listen

dcp: Any = torch.distributed.checkpoint  # it exports nothing explicitly

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "store"


def save(state: dict[str, Any], directory: Path, *, step: int = 1, **options: Any) -> None:
    dcp.save(state, storage_writer=SeatrialWriter(directory, step=step), **options)


def load(state: dict[str, Any], directory: Path, *, step: int | None = None) -> dict[str, Any]:
    dcp.load(state, storage_reader=SeatrialReader(directory, step=step))
    return state


def manifest_of(directory: Path, step: int = 1) -> Manifest:
    reader = SeatrialReader(directory, step=step)
    reader.read_metadata()
    return reader.manifest


def failure(caught: pytest.ExceptionInfo[CheckpointException], rank: int = 0) -> BaseException:
    """The error of one rank."""
    return caught.value.failures[rank][0]


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    raw = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return tensor.dtype, tensor.shape, raw.view(torch.uint8).numpy().tobytes()


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


class Custom:
    pass


@pytest.mark.parametrize("value", [Custom(), torch.float32, torch.empty(2, device="meta")])
def test_what_cannot_be_stored_is_refused_by_name_and_nothing_is_published(
    directory: Path, value: object
) -> None:
    with pytest.raises(CheckpointException) as caught:
        save({"good": torch.ones(1), "bad": [value]}, directory)
    error = failure(caught)
    assert isinstance(error, ours.StateError)
    assert "bad" in str(error)
    assert CheckpointStore(directory).latest() is None


# Names that are one tensor


def tied_model() -> Any:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(8, 4), "head": torch.nn.Linear(4, 8)})
    model["head"].weight = model["embed"].weight
    return model


def test_tied_weights_are_stored_once_and_found_under_each_name(directory: Path) -> None:
    save({"model": tied_model().state_dict()}, directory)
    entries = {entry.name: entry for entry in manifest_of(directory).tensors}
    assert entries["model.embed.weight"].chunks == entries["model.head.weight"].chunks
    assert manifest_of(directory).shards[0].size < 2 * 8 * 4 * 4 + 500
    untied = {"embed.weight": torch.zeros(8, 4), "head.weight": torch.zeros(8, 4)}
    load({"model": untied}, directory)
    for tensor in untied.values():
        assert bits(tensor) == bits(tied_model()["embed"].weight)
    assert inspect_store(directory).steps[0].problems == ()


def test_views_of_one_storage_that_differ_are_stored_each(directory: Path) -> None:
    base = torch.arange(12.0)
    state = {"a": base, "b": base[:6], "c": base[6:], "d": base.view(3, 4), "e": base.view(3, 4)}
    save(state, directory)
    chunks = {entry.name: entry.chunks[0].offset for entry in manifest_of(directory).tensors}
    assert chunks["d"] == chunks["e"]
    assert len(set(chunks.values())) == 4
    loaded = load({name: torch.zeros_like(tensor) for name, tensor in state.items()}, directory)
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_a_large_tensor_is_stored_in_chunks_and_its_tied_name_has_the_same(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seatrial.recovery.dcp_writer.CHUNK_BYTES", 64)
    weight = torch.randn(10, 7)
    save({"a": weight, "b": weight, "c": weight.t()}, directory)
    entries = {entry.name: entry for entry in manifest_of(directory).tensors}
    assert len(entries["a"].chunks) == 5
    assert entries["a"].chunks == entries["b"].chunks
    target = load({"a": torch.zeros(10, 7), "b": torch.zeros(10, 7).t().clone().t()}, directory)
    assert bits(target["a"]) == bits(weight) == bits(target["b"])
    assert bits(load({"c": torch.zeros(7, 10)}, directory)["c"]) == bits(weight.t())
    assert CheckpointStore(directory).verify(1) == []


# Models and optimizers


def training(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    trained = [*model[1].parameters(), *model[2].parameters()]
    optimizer = torch.optim.AdamW(trained, lr=torch.tensor(0.1 + seed), betas=(0.8, 0.9))
    # The last layer has not been stepped: it has no optimizer state yet.
    model[1](model[0](torch.ones(1, 3))).sum().backward()
    optimizer.step()
    return model, optimizer


def test_frozen_and_not_yet_stepped_parameters_come_back(directory: Path) -> None:
    model, optimizer = training(1)
    weights, moments = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": moments}, directory)
    other, other_optimizer = training(2)
    weights, moments = get_state_dict(other, other_optimizer)
    target: dict[str, Any] = {"model": weights, "optimizer": moments}
    load(target, directory)
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=target["model"],
        optim_state_dict=target["optimizer"],
        options=StateDictOptions(strict=False),  # torch misses what was not stepped yet
    )
    for name, tensor in model.state_dict().items():
        assert bits(other.state_dict()[name]) == bits(tensor), name
    expected, found = optimizer.state_dict(), other_optimizer.state_dict()
    assert str(found["param_groups"]) == str(expected["param_groups"])
    assert found["state"].keys() == expected["state"].keys()
    for number, moment in expected["state"].items():
        for name, tensor in moment.items():
            assert bits(found["state"][number][name]) == bits(tensor)


def test_a_stateful_object_loads_itself(directory: Path) -> None:
    model = torch.nn.Linear(2, 2)
    save({"model": model}, directory)
    other = torch.nn.Linear(2, 2)
    load({"model": other}, directory)
    assert bits(other.weight) == bits(model.weight)


def test_an_async_save_is_published_with_the_values_of_the_call(directory: Path) -> None:
    weight = torch.ones(1000)
    writer = SeatrialWriter(directory, step=1)
    if not torch.distributed.is_available():
        pytest.skip("torch without distributed")
    future = dcp.async_save({"weight": weight}, storage_writer=writer, no_dist=True)
    weight.zero_()
    future.result()
    assert load({"weight": torch.zeros(1000)}, directory)["weight"].sum() == 1000


# The other side of the format


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


def test_dcp_loads_the_tensors_that_the_store_saved(directory: Path) -> None:
    model, optimizer = training(1)
    CheckpointStore(directory).save(TrainingState(model=model, optimizer=optimizer), step=4)
    weight = load({"model/1.weight": torch.zeros(2, 5)}, directory)["model/1.weight"]
    assert bits(weight) == bits(model[1].weight)


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


def test_the_newest_step_is_loaded_unless_another_is_asked_for(directory: Path) -> None:
    for step in (1, 2, 3):
        save({"w": torch.tensor(float(step))}, directory, step=step)
    assert load({"w": torch.tensor(0.0)}, directory)["w"] == 3
    assert load({"w": torch.tensor(0.0)}, directory, step=2)["w"] == 2


# Refusals


def test_a_step_is_published_once(directory: Path) -> None:
    save({"w": torch.ones(1)}, directory)
    with pytest.raises(CheckpointException) as caught:
        save({"w": torch.zeros(1)}, directory)
    assert isinstance(failure(caught), ours.AlreadyPublishedError)
    assert load({"w": torch.zeros(1)}, directory)["w"] == 1


@pytest.mark.parametrize(("step", "text"), [(None, "nothing is published"), (5, "step 5 is not")])
def test_a_step_that_is_not_there_is_an_error(directory: Path, step: int | None, text: str) -> None:
    with pytest.raises(CheckpointException, match=text):
        load({"w": torch.zeros(1)}, directory, step=step)
    with pytest.raises(ours.CheckpointError, match=text):
        SeatrialReader(directory, step=step).read_metadata()


def flip_in(path: Path, position: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("pattern", ["*.safetensors", "*.json"])
def test_damage_is_an_error_that_says_which_step_and_file_and_what_is_older(
    directory: Path, pattern: str
) -> None:
    for step in (1, 2):
        save({"w": torch.ones(5), "value": [1, 2]}, directory, step=step)
    (path,) = (directory / "step-00000002").glob(f"attempt-*/{pattern}")
    flip_in(path)
    with pytest.raises(CheckpointException) as caught:
        load({"w": torch.zeros(5), "value": None}, directory)
    error = failure(caught)
    assert isinstance(error, ours.DamagedCheckpointError)
    assert "step 2" in str(error)
    assert path.name in str(error)
    assert "Older steps are [1]" in str(error)
    assert load({"w": torch.zeros(5)}, directory, step=1)["w"].sum() == 5


def test_a_damaged_manifest_is_an_error_and_no_older_step_is_taken(directory: Path) -> None:
    for step in (1, 2):
        save({"w": torch.ones(5)}, directory, step=step)
    flip_in(directory / "step-00000002/manifest.json")
    with pytest.raises(CheckpointException, match=r"step 2 .* not whole.*Older steps are \[1\]"):
        load({"w": torch.zeros(5)}, directory)


def test_nothing_is_cast(directory: Path) -> None:
    save({"w": torch.ones(5)}, directory)
    target = torch.zeros(5, dtype=torch.float64)
    with pytest.raises(CheckpointException) as caught:
        load({"w": target}, directory)
    assert isinstance(failure(caught), ours.MismatchError)
    assert "w is float32[5] in the checkpoint and float64[5] here" in str(failure(caught))
    assert target.sum() == 0


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


class Scrambling(DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        return object if isinstance(object, torch.Tensor) else io.BytesIO(b"my own format")


def test_a_planner_that_changes_what_is_saved_is_followed(directory: Path) -> None:
    save({"w": torch.full((3,), 0.5), "v": [0.25]}, directory, planner=Halving())
    state = load({"w": torch.zeros(3, dtype=torch.float16), "v": [None]}, directory)
    assert state["w"].tolist() == [0.5] * 3
    assert state["v"] == [0.25]


def test_a_planner_with_a_format_of_its_own_is_refused(directory: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        save({"v": 3}, directory, planner=Scrambling())
    assert isinstance(failure(caught), ours.StateError)
    assert "Scrambling encodes 'v' in its own way" in str(failure(caught))


def test_plans_that_are_cached_are_refused_before_they_write_elsewhere(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cache in ("_cached_save_plan", "_cached_final_save_plan", "_cached_all_plans"):
        monkeypatch.setattr(dcp.SavePlanner, cache, {})
    for cache in ("_cached_global_plan", "_cached_metadata"):
        monkeypatch.setattr(dcp.SavePlanner, cache, {})
    planner = DefaultSavePlanner(enable_plan_caching=True)
    save({"w": torch.ones(1)}, directory, step=1, planner=planner)
    with pytest.raises(CheckpointException) as caught:
        save({"w": torch.ones(1)}, directory, step=2, planner=planner)
    assert "enable_plan_caching=False" in str(failure(caught))
    assert CheckpointStore(directory).latest() == 1


def test_ranks_that_save_on_their_own_are_refused(directory: Path) -> None:
    with pytest.raises(ours.SaveError, match="use_collectives=False"):
        save({"w": torch.ones(1)}, directory, use_collectives=False)


def test_a_checkpoint_id_beside_writer_or_reader_is_refused(directory: Path) -> None:
    with pytest.raises(ours.CheckpointError, match="leave checkpoint_id out"):
        save({"w": torch.ones(1)}, directory, checkpoint_id=directory)
    save({"w": torch.ones(1)}, directory)
    with pytest.raises(ours.CheckpointError, match="leave checkpoint_id out"):
        dcp.load({}, storage_reader=SeatrialReader(directory), checkpoint_id="x")
    assert not SeatrialWriter.validate_checkpoint_id(directory)
    assert not SeatrialReader.validate_checkpoint_id(directory)


def test_a_negative_step_is_refused(directory: Path) -> None:
    with pytest.raises(ValueError, match="0 or more"):
        SeatrialWriter(directory, step=-1)


# The commit


def test_an_error_before_any_event_of_a_save_publishes_nothing_and_the_step_can_be_repeated(
    directory: Path, announcements: list[tuple[str, str, dict[str, object]]]
) -> None:
    save({"w": torch.ones(1)}, directory, step=0)
    events = [event for event, edge, _ in announcements if edge == "before"]
    assert events == [
        "checkpoint/shard/write",
        "checkpoint/shard/fsync",
        "checkpoint/shard/write",
        "checkpoint/shard/fsync",
        "checkpoint/directory/fsync",
        "checkpoint/manifest/write",
        "checkpoint/manifest/fsync",
        "checkpoint/manifest/link",
        "checkpoint/manifest/directory",
    ]
    for number, event in enumerate(events[:-1]):
        left = events[: number + 1].count(event)

        def fail(name: str, edge: str, facts: dict[str, object], event: str = event) -> None:
            nonlocal left
            left -= (name, edge) == (event, "before")
            if left == 0:
                raise OSError(28, "No space left on device")

        stop = listen(fail)
        writer = SeatrialWriter(directory, step=number + 1)
        with pytest.raises(CheckpointException, match="No space left"):
            dcp.save({"w": torch.ones(1)}, storage_writer=writer)
        stop()
        assert CheckpointStore(directory).latest() == number
        dcp.save({"w": torch.ones(1)}, storage_writer=writer)
        assert CheckpointStore(directory).latest() == number + 1
    # Only what lies in the store: other tests of this process come and go with theirs.
    assert [file for file in open_files() if file.startswith(str(directory))] == []


def test_files_that_were_collected_while_saving_are_not_published(directory: Path) -> None:
    def collect(event: str, edge: str, facts: dict[str, object]) -> None:
        if (event, edge) == ("checkpoint/manifest/link", "before"):
            stop()
            CheckpointStore(directory).prune()
            save({"w": torch.zeros(1)}, directory)

    stop = listen(collect)
    with pytest.raises(CheckpointException):
        save({"w": torch.ones(1)}, directory)
    assert load({"w": torch.ones(1)}, directory)["w"] == 0
    assert inspect_store(directory).latest_valid == 1


def open_files() -> list[str]:
    """What the descriptors of this process refer to."""
    files = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            files.append(os.readlink(f"/proc/self/fd/{number}"))
    return files
