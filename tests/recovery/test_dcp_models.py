"""Models and optimizers through `torch.distributed.checkpoint`, in one process.

Weights that are tied, frozen, or not stepped yet come back; names that are one tensor are stored
once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from seatrial.recovery import CheckpointStore, SeatrialReader, TrainingState, inspect_store
from seatrial.recovery.manifest import Manifest

from .dcp_calls import bits, load, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


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


def test_dcp_loads_the_tensors_that_the_store_saved(directory: Path) -> None:
    model, optimizer = training(1)
    CheckpointStore(directory).save(TrainingState(model=model, optimizer=optimizer), step=4)
    weight = load({"model/1.weight": torch.zeros(2, 5)}, directory)["model/1.weight"]
    assert bits(weight) == bits(model[1].weight)


# Names that are one tensor


def manifest_of(directory: Path, step: int = 1) -> Manifest:
    reader = SeatrialReader(directory, step=step)
    reader.read_metadata()
    return reader.manifest


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
