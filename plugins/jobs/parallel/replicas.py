"""Data parallelism: which torch wrapper replicates or shards the model, over which ranks.

``dpN`` alone is DDP. ``fsdpN`` and ``hsdpRxS`` are FSDP2, one group per block. Replicas beside
another dimension are torch's ``replicate``: DDP on FSDP2's machinery, which leaves parameters
`DTensor` and has no buckets to regroup. Context-parallel ranks are replicas with other positions,
expert-parallel ones with other experts.
"""

from __future__ import annotations

from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ..model import GPT
from .place import Place


def is_plain(place: Place) -> bool:
    """Whether DDP over all ranks is everything that the topology asks for."""
    topology = place.topology
    return topology.size("dp") == topology.world_size and not _is_sharded(place)


def over_all_ranks(model: GPT, *, bucket_mb: float) -> nn.Module:
    """DDP over the default process group; there is no mesh to be made."""
    return DistributedDataParallel(model, bucket_cap_mb=bucket_mb)


def over_data_ranks(model: GPT, place: Place, mesh: DeviceMesh) -> nn.Module:
    """The model as its data-parallel ranks share it; itself, if there is one alone."""
    size = place.topology.size
    others = [name for name in ("ep", "cp") if size(name) > 1]
    if _is_sharded(place):
        # Stages are called many times between two updates: they stay gathered meanwhile.
        reshard = False if size("pp") > 1 else None
        for module in (*model.blocks(), model):
            fully_shard(
                module, mesh=_sharding_mesh(place, mesh, others), reshard_after_forward=reshard
            )
        return model
    replicated = [name for name in ("dp", *others) if size(name) > 1]
    if not replicated:
        return model
    experts = [mixture.experts for mixture in model.mixtures()]
    ignored = {parameter for each in experts for parameter in each.parameters()}
    if size("ep") == 1:
        ignored = set()
    elif size("dp") > 1:
        for each in experts:
            replicate(each, mesh=mesh["dp"])
    for module in (*model.blocks(), model):
        replicate(module, mesh=_flat(mesh, replicated), ignored_params=ignored)
    return model


def _is_sharded(place: Place) -> bool:
    """FSDP2 runs on one rank too, if that is all there is."""
    topology = place.topology
    return topology.size("fsdp") > 1 or (topology.world_size == 1 and "fsdp" in str(topology))


def _sharding_mesh(place: Place, mesh: DeviceMesh, others: list[str]) -> DeviceMesh:
    """1-D to shard over; 2-D (replicas, shards) for HSDP."""
    if place.topology.world_size == 1:
        return mesh
    shards = [name for name in ("fsdp", *others) if place.topology.size(name) > 1]
    if place.topology.size("dp") == 1:
        return _flat(mesh, shards)
    return mesh["dp", "fsdp"]


def _flat(mesh: DeviceMesh, names: list[str]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else mesh[tuple(names)]._flatten("_".join(names))
