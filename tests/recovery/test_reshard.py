"""What one topology saved, another one restores bitwise; each distinct shard is stored once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # DTensor imports it on first use, which every forked rank would do again
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from seatrial.recovery import CheckpointStore, inspect_store
from seatrial.recovery.errors import SaveError
from seatrial.recovery.exchange import Exchange


def full_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(5, 4, generator=generator),
        "columns": torch.randn(3, 7, generator=generator).to(torch.bfloat16),
        "flat": torch.randn(2, generator=generator, dtype=torch.float64),
        "copied": torch.randn(4, 4, generator=generator),
        "plain": torch.randn(6, generator=generator),
        "middle": torch.randn(2, 6, 3, generator=generator),
    }


PLACEMENTS = {
    "rows": Shard(0),
    "columns": Shard(1),
    "flat": Shard(0),  # with three ranks, one of them holds nothing
    "copied": Replicate(),
    "middle": Shard(1),
}


def distributed(seed: int, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    return {
        name: distribute_tensor(tensor, mesh, [PLACEMENTS[name]]) if name in PLACEMENTS else tensor
        for name, tensor in full_tensors(seed).items()
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(("saving", "restoring"), [(2, 1), (1, 3), (2, 3), (3, 2), (2, 2)])
def test_another_number_of_ranks_restores_the_same_bits(
    tmp_path: Path,
    fork_ranks: Callable[..., list[Any]],
    make_state: Any,
    saving: int,
    restoring: int,
) -> None:
    def save(_rank: int, exchange: Exchange) -> None:
        state = make_state(1)
        state.live = distributed(1, init_device_mesh("cpu", (saving,)))
        CheckpointStore(tmp_path / "store", exchange=exchange).save(state, step=1)

    def restore(_rank: int, exchange: Exchange) -> list[str]:
        state = make_state(1)
        state.live = distributed(2, init_device_mesh("cpu", (restoring,)))
        assert CheckpointStore(tmp_path / "store", exchange=exchange).restore(state)
        expected = full_tensors(1)
        return [
            name for name in expected if not torch.equal(whole(state.live[name]), expected[name])
        ]

    assert fork_ranks(saving, save, process_group=True) == [None] * saving
    assert fork_ranks(restoring, restore, process_group=True) == [[]] * restoring
    assert inspect_store(tmp_path / "store").latest_valid == 1


def test_a_chain_of_topologies_loses_nothing(
    tmp_path: Path, fork_ranks: Callable[..., list[Any]], make_state: Any
) -> None:
    def hand_on(world: int, step: int) -> Callable[[int, Exchange], object]:
        def work(_rank: int, exchange: Exchange) -> object:
            state = make_state(1)
            state.live = distributed(step or 99, init_device_mesh("cpu", (world,)))
            store = CheckpointStore(tmp_path / "store", exchange=exchange)
            restored = store.restore(state)
            store.save(state, step=step)
            return restored and restored.step

        return work

    results = [
        fork_ranks(world, hand_on(world, step), process_group=True)
        for step, world in enumerate([2, 1, 3])
    ]
    assert results == [[None] * 2, [0], [1] * 3]
    state = make_state(1)
    state.live = full_tensors(5)
    CheckpointStore(tmp_path / "store").restore(state)
    for name, tensor in full_tensors(99).items():
        assert torch.equal(state.live[name], tensor)


def test_shards_of_two_mesh_dimensions_are_stored_once_each(
    tmp_path: Path, fork_ranks: Callable[..., list[Any]], make_state: Any
) -> None:
    """HSDP (replicate x shard), and FSDP over TP on one dimension, whose order is strided."""

    def save(_rank: int, exchange: Exchange) -> object:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        full = torch.arange(24.0).reshape(8, 3)
        state = make_state(1)
        state.live = {"hsdp": distribute_tensor(full, mesh, [Replicate(), Shard(0)])}
        # FSDP2 shards what TP has sharded: each TP half, again by halves.
        dp, tp = mesh.get_coordinate() or (0, 0)
        local = full.chunk(2)[tp].chunk(2)[dp].clone()
        state.live["strided"] = DTensor.from_local(
            local, mesh, [_StridedShard(0, split_factor=2), Shard(0)]
        )
        manifest = CheckpointStore(tmp_path / "store", exchange=exchange).save(state, step=1)
        return {
            entry.name: sorted((c.offsets, c.sizes) for c in entry.chunks)
            for entry in manifest.tensors
        }

    results = fork_ranks(4, save, process_group=True)
    assert results[0] == {
        "hsdp": [((0, 0), (4, 3)), ((4, 0), (4, 3))],
        "strided": [((n, 0), (2, 3)) for n in (0, 2, 4, 6)],
    }
    state = make_state(1)
    state.live = {name: torch.zeros(8, 3) for name in ("hsdp", "strided")}
    CheckpointStore(tmp_path / "store").restore(state)
    for tensor in state.live.values():
        assert torch.equal(tensor, torch.arange(24.0).reshape(8, 3))


def test_a_pending_reduction_is_refused_by_name(
    tmp_path: Path, fork_ranks: Callable[..., list[Any]], make_state: Any
) -> None:
    def save(_rank: int, exchange: Exchange) -> None:
        mesh = init_device_mesh("cpu", (2,))
        state = make_state(1)
        state.live = {"grad": DTensor.from_local(torch.ones(2), mesh, [Partial()])}
        CheckpointStore(tmp_path / "store", exchange=exchange).save(state, step=1)

    for error in fork_ranks(2, save, process_group=True):
        assert isinstance(error, SaveError)
        assert "tensor 'grad' is a pending reduction" in str(error)
