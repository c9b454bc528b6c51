"""The table of operations against torch's own group, and the events that faults wait for."""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work

from seatrial.chaos.events import EVENTS
from seatrial.recovery.collectives.operations import OPERATIONS, Operation, reduction_of, root_of

NO_CALLS = {"monitored_barrier", "_wait_for_pending_works", "split_group", "merge_remote_group"}


def operation(name: str) -> Operation:
    return next(each for each in OPERATIONS if each.name == name)


def test_every_method_that_returns_a_handle_is_an_operation() -> None:
    methods = {
        name
        for name, method in inspect.getmembers(ProcessGroup)
        if "-> c10d::Work" in (getattr(method, "__doc__", "") or "")
    }
    assert len(methods) > 15
    known = {method for each in OPERATIONS for method in each.methods}
    assert methods - {"_end_coalescing"} <= known


def test_every_operation_is_an_event() -> None:
    events = [event.name for event in EVENTS if event.stage == "collective"]
    assert events == [f"collective/{each.name}" for each in OPERATIONS]


def test_reductions_are_told_apart() -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    given = [torch.ones(1)], options
    most = reduction_of(operation("all_reduce"), given)
    total = reduction_of(operation("all_reduce"), ([torch.ones(1)],))
    assert most == reduction_of(operation("all_reduce"), ([torch.ones(1)], dist.ReduceOp.MAX))
    assert most != total == 0


def test_roots_are_found_in_both_forms() -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 3
    assert root_of(operation("broadcast"), ([torch.ones(1)], options)) == 3
    assert root_of(operation("broadcast"), (torch.ones(1), 2)) == 2


def test_a_handle_answers_everything_that_torch_asks_of_one() -> None:
    from seatrial.recovery.collectives.works import ForwardingWork

    asked = {name for name in vars(Work) if not name.startswith("__")}
    not_asked = {"_pybind11_conduit_v1_", "boxed", "unbox", "_get_duration"}
    assert asked - not_asked <= vars(ForwardingWork).keys()
