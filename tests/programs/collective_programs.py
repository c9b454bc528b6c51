"""What ranks call in the tests of collectives: entries of a `Workload`."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from seatrial.chaos.launch.context import RankContext
from seatrial.recovery.collectives import Consistency, calls
from seatrial.recovery.collectives.observer import Observer
from seatrial.recovery.errors import CollectiveMismatchError
from seatrial.recovery.probe import around

Arguments = dict[str, Any]


def every_call(context: RankContext, arguments: Arguments) -> None:
    """Every way to call a group, and for each what was seen of it and how far gloo has counted."""
    seen = _Seen(context)
    rank, size, world = context.rank, context.world_size, dist.group.WORLD
    assert world is not None
    one = torch.ones(4)
    with seen.by("plain"):
        dist.all_reduce(one)
        dist.broadcast(one, 0)
        dist.reduce(one, 0)
        dist.all_gather([torch.empty(4) for _ in range(size)], one)
        dist.all_gather_into_tensor(torch.empty(4 * size), one)
        dist.reduce_scatter_tensor(torch.empty(4), torch.ones(4 * size))
        dist.all_to_all_single(torch.empty(4), one)
        dist.gather(one, [torch.empty(4) for _ in range(size)] if rank == 0 else None, dst=0)
        dist.scatter(one, [torch.ones(4) for _ in range(size)] if rank == 0 else None, src=0)
        dist.barrier()
    with seen.by("list"):  # which gloo carries out by another, and counts both
        dist.reduce_scatter(torch.empty(4), [torch.ones(4) for _ in range(size)])
    with seen.by("objects"):
        found: list[Any] = [None] * size
        dist.all_gather_object(found, {"rank": rank})
        assert found == [{"rank": each} for each in range(size)]
        dist.broadcast_object_list([rank], 0)
    with seen.by("messages"):
        other = 1 - rank
        if rank == 0:
            dist.send(one, other)
            assert dist.recv(one) == other
        else:
            dist.recv(one, other)
            dist.send(one, other)
        both = [dist.P2POp(dist.isend, one, other), dist.P2POp(dist.irecv, torch.empty(4), other)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
    with seen.by("functional"):
        functional.all_reduce(one, "sum", world).sum()
        functional.all_gather_tensor(one, 0, world).sum()
        functional.reduce_scatter_tensor(torch.ones(4 * size), "sum", 0, world).sum()
        functional.all_to_all_single(one, None, None, world).sum()
        functional.all_reduce_coalesced([one, one], "sum", world)[0].sum()
    with seen.by("ddp"):
        model = DistributedDataParallel(nn.Linear(4, 4))
        torch.autograd.backward(model(torch.ones(2, 4)).sum())
    with seen.by("fsdp"):
        sharded = nn.Linear(4, 4)
        fully_shard(sharded, mesh=init_device_mesh("cpu", (size,), mesh_dim_names=("shards",)))
        torch.autograd.backward(sharded(torch.ones(2, 4)).sum())
    context.trace.record("backend", name=dist.get_backend())


class _Seen:
    """Counts calls by operation, and beside that what gloo says it has run."""

    def __init__(self, context: RankContext) -> None:
        self._context, self._observer = context, context.observer

    def by(self, name: str) -> _Between:
        return _Between(self._context, self._observer, name)


class _Between:
    def __init__(self, context: RankContext, observer: Observer, name: str) -> None:
        self._context, self._observer, self._name = context, observer, name

    def __enter__(self) -> None:
        self._before = self._counts()

    def __exit__(self, *_: object) -> None:
        seen, run = self._counts()
        self._context.trace.record(
            "seen", by=self._name, calls=seen - self._before[0], run=run - self._before[1]
        )

    def _counts(self) -> tuple[Counter[str], int]:
        seen: Counter[str] = Counter()
        run = 0
        for group in self._observer.groups:
            for stream in (group.collectives, *group.pairs.values()):
                seen.update(signature.operation for signature in stream.recent)
            run += group._get_backend(torch.device("cpu"))._get_sequence_number_for_group()
        return seen, run


def steps(context: RankContext, arguments: Arguments) -> None:
    """Steps of one of the programs below, compared after each; what came out, or what was found."""
    consistency = Consistency(context.observer, timeout_s=20.0)
    program = globals()[arguments["named"]](context)
    for step in range(1, 4):
        with around("step", step=step):
            result = program(step)
        try:
            consistency.check(step)
        except CollectiveMismatchError as error:
            context.trace.record("mismatch", step=step, said=str(error))
            raise
        context.trace.record(
            "result", step=step, values=result, explanations=consistency.explanations
        )


def two_lines(context: RankContext) -> Any:
    """Two sums under way together, from two lines."""

    def step(number: int) -> list[float]:
        first = torch.full((4,), number * 1.0 + context.rank)
        second = torch.full((4,), number * 10.0 + context.rank)
        a = dist.all_reduce(first, async_op=True)
        b = dist.all_reduce(second, async_op=True)
        a.wait()
        b.wait()
        return [float(first[0]), float(second[0])]

    return step


def branches(context: RankContext) -> Any:
    """Ranks that rightly call from different lines, and some of them from more than one."""

    def step(number: int) -> list[float]:
        tensor = torch.full((4,), float(number))
        if context.rank == 0:
            for _ in range(2):
                dist.broadcast(tensor, 0)
        else:
            dist.broadcast(tensor, 0)
            dist.broadcast(tensor, 0)
        return tensor.tolist()

    return step


def takes_turns(context: RankContext) -> Any:
    """Each rank is the root of a broadcast, which it makes from another line than the others."""

    def step(number: int) -> list[float]:
        mine, theirs = torch.full((4,), float(number)), torch.zeros(4)
        for source in range(context.world_size):
            if source == context.rank:
                dist.broadcast(mine, source)
            else:
                dist.broadcast(theirs, source)
        return theirs.tolist()

    return step


def skips_the_last(context: RankContext) -> Any:
    """Rank 1 leaves out the last call of step 2, for which rank 0 does not wait."""
    under_way = []

    def step(number: int) -> list[float]:
        dist.all_reduce(torch.ones(4))
        if context.rank == 0 or number != 2:
            under_way.append(dist.all_reduce(torch.ones(4), async_op=True))
        return []

    return step


def late_messages(context: RankContext) -> Any:
    """Messages that are received a step after they were sent."""
    box: list[Any] = []

    def step(number: int) -> list[float]:
        if context.rank == 0:
            box.append(dist.isend(torch.full((2,), float(number)), 1))
            return []
        if number == 1:
            return []
        received = torch.empty(2)
        dist.recv(received, 0)
        return received.tolist()

    return step


def messages(context: RankContext) -> Any:
    """Two messages under way together."""

    def step(number: int) -> list[float]:
        tensors = [torch.full((2,), 10.0 * number + each) for each in range(2)]
        if context.rank == 0:
            works = [dist.isend(tensor, 1) for tensor in tensors]
        else:
            works = [dist.irecv(tensor, 0) for tensor in tensors]
        for work in works:
            if work is not None:
                work.wait()
        return [float(tensor[0]) for tensor in tensors]

    return step


def two_groups(context: RankContext) -> Any:
    """Sums under way together in two groups of the same ranks."""
    groups = [dist.new_group([0, 1], group_desc=name) for name in ("red", "blue")]

    def step(number: int) -> list[float]:
        tensors = [torch.full((4,), number * factor + context.rank) for factor in (1.0, 10.0)]
        works = [
            dist.all_reduce(tensor, group=group, async_op=True)
            for tensor, group in zip(tensors, groups, strict=True)
        ]
        for work in works:
            work.wait()
        return [float(tensor[0]) for tensor in tensors]

    return step


def one_of_each(context: RankContext) -> Any:
    """A broadcast, a sum and a barrier, each waited for."""

    def step(number: int) -> list[float]:
        tensor = torch.arange(1.0, 9.0) * number + context.rank
        dist.broadcast(tensor, 0)
        dist.all_reduce(tensor)
        dist.barrier()
        return tensor.tolist()

    return step


def remade_groups(context: RankContext, arguments: Arguments) -> None:
    """Groups that are made, used and destroyed: how many are still known, and with which names."""
    for turn in range(3):
        group = dist.new_group([0, 1], group_desc=f"turn{turn}")
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
        del group
    gc.collect()
    context.trace.record("known", names=[group.label for group in context.observer.groups])


def more_than_are_kept(context: RankContext, arguments: Arguments) -> None:
    """1500 calls under way at once, of which the first and the last are waited for."""
    calls.KEPT = 4  # type: ignore[attr-defined]
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(1500)]
    works[-1].wait()
    works[0].wait()
    (group,) = context.observer.groups
    kept = len(group.collectives.recent), group.collectives.folded, group.collectives.count
    Consistency(context.observer).check(1)
    left = len(group.collectives.recent), group.collectives.folded, group.collectives.count
    context.trace.record("kept", kept=kept, left=left)


def one_number(context: RankContext) -> Any:
    """A sum of a single number, then a broadcast."""

    def step(number: int) -> list[float]:
        tensor = torch.full((), float(number + context.rank))
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        return [float(tensor)]

    return step


def whole_numbers(context: RankContext) -> Any:
    """A sum of integers."""

    def step(number: int) -> list[int]:
        tensor = torch.full((4,), number + context.rank)
        dist.all_reduce(tensor)
        return tensor.tolist()

    return step
