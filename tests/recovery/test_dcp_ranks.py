"""`torch.distributed.checkpoint` on the manifest store, in real processes: sharding, resharding,
errors and kills. gloo on CPU only."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # DTensor imports it on first use, which every forked rank would do again
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from seatrial.recovery import CheckpointStore, SeatrialReader, SeatrialWriter, inspect_store
from seatrial.recovery.probe import listen

dcp: Any = torch.distributed.checkpoint  # it exports nothing explicitly
ForkRanks = Callable[..., list[Any]]


def full_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(5, 4, generator=generator),
        "columns": torch.randn(3, 7, generator=generator).to(torch.bfloat16),
        "few": torch.randn(2, generator=generator, dtype=torch.float64),
        "none": torch.empty(0, 3),
        "copied": torch.randn(4, 4, generator=generator),
        "complex": torch.randn(5, generator=generator, dtype=torch.complex64),
        "mask": torch.rand(7, generator=generator) > 0.5,
        "zero-dim": torch.tensor(float(seed)),
        "plain": torch.randn(6, generator=generator),
    }


PLACEMENTS = {
    "rows": Shard(0),
    "columns": Shard(1),
    "few": Shard(0),  # with three ranks, one of them holds nothing
    "none": Shard(0),
    "copied": Replicate(),
    "complex": Shard(0),
    "mask": Shard(0),
}


def distributed(seed: int, mesh: DeviceMesh) -> dict[str, Any]:
    return {
        name: distribute_tensor(tensor, mesh, [PLACEMENTS[name]]) if name in PLACEMENTS else tensor
        for name, tensor in full_tensors(seed).items()
    }


def whole(tensor: Any) -> torch.Tensor:
    return torch.as_tensor(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


def different(state: dict[str, Any], expected: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in expected if not torch.equal(whole(state[name]), expected[name])]


def failures(work: Callable[[], object]) -> dict[int, tuple[str, str]]:
    """The failures that DCP reports on this rank: class and text, by rank."""
    try:
        work()
    except CheckpointException as error:
        return {rank: (type(e).__name__, str(e)) for rank, (e, _) in error.failures.items()}
    return {}


@pytest.mark.parametrize("worlds", [(2, 1, 3), (3, 2)])
def test_a_chain_of_world_sizes_loses_nothing(
    directory: Path, fork_ranks: ForkRanks, worlds: tuple[int, ...]
) -> None:
    for step, world in enumerate(worlds):

        def work(_rank: int, _exchange: Any, step: int = step, world: int = world) -> object:
            state = distributed(99 if step == 0 else step, init_device_mesh("cpu", (world,)))
            state["value"] = {"lr": 0.5 if step == 0 else None}
            wrong = None
            if step > 0:
                dcp.load(state, storage_reader=SeatrialReader(directory))
                wrong = different(state, full_tensors(99))
            dcp.save(state, storage_writer=SeatrialWriter(directory, step=step))
            return wrong, state["value"]

        expected: Any = (None if step == 0 else [], {"lr": 0.5})
        assert fork_ranks(world, work, process_group=True) == [expected] * world
    report = inspect_store(directory)
    assert report.latest_valid == len(worlds) - 1
    assert all(each.valid for each in report.steps)


def test_the_store_restores_what_ranks_saved_through_dcp_and_the_reverse(
    directory: Path, fork_ranks: ForkRanks, make_state: Any
) -> None:
    def work(_rank: int, exchange: Any) -> object:
        mesh = init_device_mesh("cpu", (2,))
        dcp.save(distributed(1, mesh), storage_writer=SeatrialWriter(directory, step=1))
        store = CheckpointStore(directory, exchange=exchange)
        state = make_state(2)
        state.live = distributed(2, mesh)
        restored = store.restore(state)
        assert restored is not None
        found = [different(state.live, full_tensors(1))]
        store.save(state, step=2)
        loaded = distributed(3, mesh)
        dcp.load(loaded, storage_reader=SeatrialReader(directory))
        return [*found, different(loaded, full_tensors(1))]

    assert fork_ranks(2, work, process_group=True) == [[[], []]] * 2


class Model(torch.nn.Module):
    """Tied weights, a frozen bias, sizes that do not divide by the ranks, and an idle layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(7, 6)
        self.up = torch.nn.Linear(6, 10)
        self.down = torch.nn.Linear(10, 6)
        self.idle = torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.up.bias.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.down(self.up(self.embed(tokens)).relu())
        return torch.as_tensor(self.head(hidden).sum())


def fsdp(model: Model) -> Model:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def hsdp(model: Model) -> Model:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return model


def fsdp_tp(model: Model) -> Model:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    return model


WRAPPERS: dict[str, tuple[int, Callable[[Model], Model]]] = {
    "plain": (1, lambda model: model),
    "fsdp2": (2, fsdp),
    "fsdp3": (3, fsdp),
    "hsdp": (4, hsdp),
    "fsdp-tp": (4, fsdp_tp),
}


def states(wrapper: str, seed: int) -> tuple[Model, torch.optim.Optimizer]:
    """A model and its optimizer, stepped once except for the idle layer."""
    model = WRAPPERS[wrapper][1](Model(seed))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    model(torch.tensor([[1, 2, 6]])).backward()
    optimizer.step()
    return model, optimizer


def full_state(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    weights, moments = get_state_dict(model, optimizer)
    moments_of: Any = moments["state"]
    state = {name: whole(weights[name]).detach().clone() for name in weights}
    for name, values in moments_of.items():
        state |= {f"{name}:{key}": whole(value).clone() for key, value in values.items()}
    return state


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        ("fsdp2", "plain"),
        ("plain", "fsdp3"),
        ("fsdp3", "fsdp2"),
        ("hsdp", "fsdp-tp"),
        ("fsdp-tp", "plain"),
    ],
)
def test_a_model_and_its_optimizer_come_back_bitwise_under_another_wrapper(
    directory: Path, fork_ranks: ForkRanks, saving: str, loading: str
) -> None:
    def save(_rank: int, _exchange: Any) -> object:
        model, optimizer = states(saving, 1)
        weights, moments = get_state_dict(model, optimizer)
        # Without a process group of several ranks DCP saves in one process.
        dcp.save(
            {"model": weights, "optimizer": moments},
            storage_writer=SeatrialWriter(directory, step=1),
        )
        return {name: tensor.numpy() for name, tensor in full_state(model, optimizer).items()}

    def load(_rank: int, _exchange: Any) -> object:
        model, optimizer = states(loading, 2)
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments}
        dcp.load(state, storage_reader=SeatrialReader(directory))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=False),
        )
        return {name: tensor.numpy() for name, tensor in full_state(model, optimizer).items()}

    saved = fork_ranks(WRAPPERS[saving][0], save, process_group=True)
    loaded = fork_ranks(WRAPPERS[loading][0], load, process_group=True)
    for found in loaded:
        assert isinstance(found, dict), found
        assert found.keys() == saved[0].keys()
        for name, values in found.items():
            assert values.tobytes() == saved[0][name].tobytes(), name
    assert "up.bias" in loaded[0]
    assert "up.bias:exp_avg" not in loaded[0]
    assert inspect_store(directory).latest_valid == 1
    reader = SeatrialReader(directory)
    reader.read_metadata()
    entries = {entry.name: entry.chunks for entry in reader.manifest.tensors}
    assert entries["model.embed.weight"] == entries["model.head.weight"]


def test_an_async_save_of_several_ranks_is_published_and_holds_the_values_of_the_call(
    directory: Path, fork_ranks: ForkRanks
) -> None:
    def work(_rank: int, _exchange: Any) -> object:
        state = distributed(1, init_device_mesh("cpu", (2,)))
        future = dcp.async_save(state, storage_writer=SeatrialWriter(directory, step=1))
        for tensor in state.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
        future.result()
        dcp.load(state, storage_reader=SeatrialReader(directory))
        return different(state, full_tensors(1))

    assert fork_ranks(2, work, process_group=True) == [[], []]


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("event", ["shard/write", "shard/fsync", "directory/fsync"])
def test_an_error_on_any_rank_is_raised_on_all_and_nothing_is_published(
    directory: Path, fork_ranks: ForkRanks, culprit: int, event: str
) -> None:
    def work(rank: int, _exchange: Any) -> object:
        def fail(name: str, edge: str, facts: dict[str, object]) -> None:
            if (name, edge) == (f"checkpoint/{event}", "before"):
                raise OSError(28, "No space left on device")

        stop = listen(fail) if rank == culprit else lambda: None
        state = distributed(1, init_device_mesh("cpu", (2,)))
        writer = SeatrialWriter(directory, step=1)
        found = failures(lambda: dcp.save(state, storage_writer=writer))
        published = CheckpointStore(directory).latest()
        stop()
        dcp.save(state, storage_writer=writer)
        return found, published

    expected = ({culprit: ("OSError", "[Errno 28] No space left on device")}, None)
    assert fork_ranks(2, work, process_group=True) == [expected] * 2
    assert inspect_store(directory).latest_valid == 1


@pytest.mark.parametrize("culprit", [0, 1])
def test_damage_that_one_rank_meets_is_raised_on_all(
    directory: Path, fork_ranks: ForkRanks, culprit: int
) -> None:
    def work(_rank: int, _exchange: Any) -> object:
        state = distributed(1, init_device_mesh("cpu", (2,)))
        del state["plain"], state["copied"], state["zero-dim"]
        if not directory.exists():
            dcp.save(state, storage_writer=SeatrialWriter(directory, step=1))
        return failures(lambda: dcp.load(state, storage_reader=SeatrialReader(directory)))

    assert fork_ranks(2, work, process_group=True) == [{}, {}]
    (path,) = directory.glob(f"step-*/attempt-*/rank-0000{culprit}.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for found in fork_ranks(2, work, process_group=True):
        assert {rank: kind for rank, (kind, _) in found.items()} == {
            culprit: "DamagedCheckpointError"
        }
        assert path.name in found[culprit][1]


def test_ranks_with_different_steps_are_told(directory: Path, fork_ranks: ForkRanks) -> None:
    def work(rank: int, _exchange: Any) -> object:
        state = {"w": torch.ones(2)}
        saved = failures(
            lambda: dcp.save(state, storage_writer=SeatrialWriter(directory, step=rank))
        )
        for step in (1, 2):
            dcp.save(state, storage_writer=SeatrialWriter(directory, step=step))
        loaded = failures(
            lambda: dcp.load(state, storage_reader=SeatrialReader(directory, step=1 + rank))
        )
        return saved, loaded

    for saved, loaded in fork_ranks(2, work, process_group=True):
        assert saved == {0: ("SaveError", "the ranks save different steps: {0: 0, 1: 1} by rank")}
        assert loaded[0][0] == "CheckpointError"
        assert "the ranks see different checkpoints" in loaded[0][1]
        assert "{0: 1, 1: 2}" in loaded[0][1]


def test_a_group_of_some_ranks_saves_by_itself(directory: Path, fork_ranks: ForkRanks) -> None:
    def work(rank: int, _exchange: Any) -> object:
        group = dist.new_group([1, 2])
        state: dict[str, Any] = {"w": torch.full((2,), float(rank > 0)), "v": [rank > 0]}
        if rank > 0:
            writer = SeatrialWriter(directory, step=1)
            dcp.save(state, storage_writer=writer, process_group=group)
        dist.barrier()
        state = {"w": torch.zeros(2), "v": [None]}
        dcp.load(state, storage_reader=SeatrialReader(directory))
        return state["w"].tolist(), state["v"]

    assert fork_ranks(3, work, process_group=True) == [([1.0, 1.0], [True])] * 3


@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_at_any_event_leaves_the_old_or_the_new(
    directory: Path, fork_ranks: ForkRanks, make_state: Any, victim: int
) -> None:
    newest: list[int] = []
    for nth in range(1, 100):  # ends with the first run in which nothing was left to kill
        place = directory / str(nth)

        def work(rank: int, _exchange: Any, nth: int = nth, place: Path = place) -> None:
            mesh = init_device_mesh("cpu", (2,))
            dcp.save(distributed(1, mesh), storage_writer=SeatrialWriter(place, step=1))
            left = nth

            def kill(event: str, edge: str, facts: dict[str, object]) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            if rank == victim:
                listen(kill)
            dcp.save(distributed(2, mesh), storage_writer=SeatrialWriter(place, step=2))

        results = fork_ranks(2, work, process_group=True)
        report = inspect_store(place)
        assert all(step.valid for step in report.steps if step.published)
        newest.append(report.latest_valid or 0)
        state = make_state(1)
        state.live = full_tensors(9)
        restored = CheckpointStore(place).restore(state)
        assert restored is not None
        assert different(state.live, full_tensors(restored.step)) == []
        assert inspect_store(place).leftovers == ()
        if results == [None, None]:
            break
        assert results[victim] == -signal.SIGKILL
    assert (newest[0], newest[-1]) == (1, 2)
    assert newest == sorted(newest)
    assert nth > (17 if victim == 0 else 9)
