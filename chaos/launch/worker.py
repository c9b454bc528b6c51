"""What one rank does, from its first instruction to its exit status, under every launcher.

The custodian forks into `run_rank`; the others run this module as a program. Under ``hosts`` the
process group meets over the network, as torchrun's environment says, and not by a file. The
environment a job sees is torchrun's: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK,
GROUP_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_RUN_ID.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import multiprocessing.util
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from seatrial.recovery.collectives.group import ObservedGroup
from seatrial.recovery.collectives.log import CallLog
from seatrial.recovery.collectives.observer import Observer, observe
from seatrial.recovery.probe import listen, probe
from seatrial.recovery.rng import seed_everything

from ..collectives.bender import Bender
from ..errors import LaunchError, UsageError
from ..flight_recorder import answer_with_flight_record, record_file
from ..inject import Injector, Position, pid_file
from ..ledger import Ledger
from ..litter import mapped_segments
from ..schedule import Schedule
from ..stacks import answer_with_stacks
from ..storage import arm
from ..timing.stopwatch import Stopwatch
from ..trace import TraceWriter
from .context import RankContext
from .plan import AttemptPlan
from .processes import die_with_parent
from .rendezvous import EagerFileStore

Entry = Callable[[RankContext, dict[str, object]], None]


def run_rank(plan: AttemptPlan, rank: int) -> int:
    """Run one rank to its end and return its exit status.

    The exception that ends a rank is printed to its output file and recorded in its trace.
    """
    _redirect_output(plan.output_file(rank))
    _set_environment(plan, rank)
    answer_with_stacks(plan.stacks_file(rank))
    answer_with_flight_record(record_file(Path(plan.directory), rank))
    pid_file(Path(plan.directory), rank).write_text(str(os.getpid()))
    trace = TraceWriter(plan.trace_file(rank))
    trace.record("process", pid=os.getpid(), attempt=plan.attempt, rank=rank)
    os.register_at_fork(after_in_child=lambda: trace.record("forked", pid=os.getpid()))
    try:
        _run(plan, rank, trace)
        trace.record("ended", status=0, cpu_s=time.process_time(), segments=mapped_segments())
        return 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1 if leaving.code else 0
        trace.record("ended", status=status, segments=mapped_segments())
        if leaving.code and not isinstance(leaving.code, int):
            print(leaving.code, file=sys.stderr)
        return status
    except BaseException as error:
        # First of all: its time tells which rank failed first.
        names = [kind.__name__ for kind in type(error).__mro__]
        causes = list(_causes(error))
        trace.record(
            "error",
            type=type(error).__name__,
            bases=names,
            message=str(error),
            causes=[type(cause).__name__ for cause in causes],
            said=[str(cause) for cause in causes],
        )
        traceback.print_exc()
        return 1
    finally:
        _flush()


def _run(plan: AttemptPlan, rank: int, trace: TraceWriter) -> None:
    world, directory = plan.world, Path(plan.directory)
    ledger = Ledger(Path(plan.run_directory) / "strikes")
    position = Position(
        rank=rank,
        world_size=world.ranks,
        ranks_per_node=world.ranks_per_node,
        attempt=plan.attempt,
        store=plan.store,
        pids=directory,
    )
    schedule = Schedule.parse(plan.schedule)
    observer = observe(CallLog(plan.calls_file(rank)))
    bender = Bender(observer, trace, seed=schedule.seed)
    if any(fault.concerns_collectives for fault in schedule.faults):
        # Announcing costs some tens of microseconds a call, and nobody else listens.
        observer.announces, observer.interceptor = True, bender
    injector = Injector(schedule, position, ledger, trace, bend=bender.arm)
    stopwatch = Stopwatch(trace)
    observer.meter = stopwatch.meter
    for listener in (stopwatch.opens, injector, stopwatch.closes):
        listen(listener)
    strikes = Path(plan.run_directory) / "strikes"
    disarm = arm(injector, position, strikes=strikes, trace=plan.trace_file(rank))
    try:
        _work(plan, rank, trace, observer)
    finally:
        disarm()


def _work(plan: AttemptPlan, rank: int, trace: TraceWriter, observer: Observer) -> None:
    world, directory = plan.world, Path(plan.directory)
    probe("start", "before")
    local_rank = rank % world.ranks_per_node
    device, backend = _choose_device(world.device, rank, world.ranks)
    seed_everything(plan.seed, rank)
    if backend == "gloo":
        _yield_locks()
    _initialise_process_group(plan, rank, backend)
    probe("start", "after")
    trace.record("device", device=str(device), backend=backend)
    context = RankContext(
        rank=rank,
        world_size=world.ranks,
        local_rank=local_rank,
        node=rank // world.ranks_per_node,
        attempt=plan.attempt,
        seed=plan.seed,
        topology=world.topology,
        device=device,
        store=plan.store,
        directory=directory,
        timeout_s=plan.timeout_s,
        trace=trace,
        observer=observer,
    )
    _load(plan.workload.entry)(context, plan.workload.arguments)
    probe("exit", "before")
    if backend == "gloo":
        _KEPT.append(dist.group.WORLD)
    dist.destroy_process_group()
    probe("exit", "after")


_KEPT: list[object] = []
"""As long as the process: the store, and the group, as the end of a gloo group waits for its
threads, 20 ms of every trial."""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """What ``error`` was raised from or while handling, newest first."""
    seen = {id(error)}
    cause = error.__cause__ or error.__context__
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__


def _load(entry: str) -> Entry:
    module, _, name = entry.partition(":")
    function: Entry = getattr(importlib.import_module(module), name)
    return function


def _choose_device(wanted: str, rank: int, ranks: int) -> tuple[torch.device, str]:
    """The rank's device and the backend: NCCL needs a GPU for each rank, gloo does not.

    Nodes are simulated: all ranks share the GPUs of this machine.
    """
    count = torch.cuda.device_count() if wanted != "cpu" else 0
    if count == 0:
        if wanted == "cuda":
            raise UsageError("the device is 'cuda', but torch sees no GPU")
        return torch.device("cpu"), "gloo"
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)
    return device, "nccl" if ranks <= count else "gloo"


def _yield_locks() -> None:
    """Have this thread, and all that it starts, never preempt another one just by waking up.

    Gloo sends with the lock of the connection held. The answer wakes its event loop, which may take
    the sender's processor, and then asks for the lock over and over until the sender's next turn:
    4 ms, in every third small all-reduce where there are as many ranks as processors. With
    ``SCHED_BATCH`` (sched(7)) the sender goes on until it waits.
    """
    with contextlib.suppress(OSError):  # a container may forbid it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _initialise_process_group(plan: AttemptPlan, rank: int, backend: str) -> None:
    timeout = timedelta(seconds=plan.timeout_s)
    # Neither new_group nor DeviceMesh inherits the default group's timeout (they take 1800 s), so
    # the default itself is replaced for the life of this process.
    distributed_c10d._get_default_timeout = lambda backend: timeout
    where: dict[str, Any] = {}  # as the environment says
    if not plan.hosts:
        store = dist.FileStore(  # type: ignore[attr-defined]
            str(Path(plan.directory) / "rendezvous"), plan.world.ranks
        )
        where["store"] = EagerFileStore(store) if backend == "gloo" else store
        where["store"].set_timeout(timeout)
        _KEPT.append(where["store"])
    dist.init_process_group(
        backend, rank=rank, world_size=plan.world.ranks, timeout=timeout, **where
    )
    if backend == "gloo":
        # A rank is connected as soon as its peer's kernel has taken the connection. One that left
        # now would break it before the peer has looked, and the peer's rendezvous would fail.
        # Not a collective of the job: no fault counts it.
        world = dist.group.WORLD
        assert isinstance(world, ObservedGroup)
        world.unobserved.barrier().wait()


def _set_environment(plan: AttemptPlan, rank: int) -> None:
    world = plan.world
    if plan.hosts and int(os.environ["GROUP_RANK"]) != rank // world.ranks_per_node:
        raise LaunchError(f"torchrun put rank {rank} on host {os.environ['GROUP_RANK']}")
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % world.ranks_per_node),
        "WORLD_SIZE": str(world.ranks),
        "LOCAL_WORLD_SIZE": str(world.ranks_per_node),
        "GROUP_RANK": str(rank // world.ranks_per_node),
        "GROUP_WORLD_SIZE": str(world.nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world.ranks),
        "TORCHELASTIC_RESTART_COUNT": str(plan.attempt - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.max_restarts),
        "TORCHELASTIC_RUN_ID": Path(plan.run_directory).name,
        "TMPDIR": str(Path(plan.directory) / "tmp"),
    }
    # torchrun has already chosen these; ours are as good for a job that uses env:// itself.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(plan.master_port))
    tempfile.tempdir = None


def _redirect_output(path: Path) -> None:
    _flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    # What a rank has printed is there when it is killed.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def leave(status: int) -> None:
    """End a forked rank as `multiprocessing` ends its children: without the parent's clean-up."""
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    _flush()
    os._exit(status)


def main() -> None:
    """``python -m seatrial.chaos.launch.worker PLAN RANK PARENT``; under torchrun, as
    `seatrial.chaos.launch.torchrun_worker`, PLAN alone, and RANK is in the environment."""
    if len(sys.argv) > 2:
        die_with_parent(int(sys.argv[3]))
    plan = AttemptPlan.from_json(Path(sys.argv[1]).read_text())
    modules = plan.workload.preload
    for name in ("torch._dynamo", *modules) if modules else ():
        # What a forked rank finds imported. It would else be silent in the midst of its work, and
        # look hung. What cannot be imported fails where it is used.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    status = run_rank(plan, int(sys.argv[2] if len(sys.argv) > 2 else os.environ["RANK"]))
    _KEPT.clear()  # before the interpreter ends, under the threads of a group
    sys.exit(status)


if __name__ == "__main__":
    main()
