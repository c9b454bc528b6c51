"""What ranks run in the tests of launching and supervision: entries of a `Workload`."""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from seatrial.chaos.launch.context import RankContext
from seatrial.chaos.supervisor import PREEMPTED
from seatrial.recovery.probe import around, probe

Arguments = dict[str, Any]


def train(context: RankContext, arguments: Arguments) -> None:
    """Steps with their phases, an all-reduce in each backward."""
    for step in range(1, arguments.get("steps", 5) + 1):
        with around("step", step=step):
            with context.phase("forward"):
                value = torch.ones(4)
            with context.phase("backward"):
                dist.all_reduce(value)
        context.trace.record("did", step=step)


def reads_in_a_worker(context: RankContext, arguments: Arguments) -> None:
    """In a step a process is forked that reads a record, as a data loader's does."""
    with around("step", step=1):
        worker = os.fork()
        if not worker:
            probe("data/record", "before", record=7, data=bytearray(b"seven"))
            os._exit(0)
        os.waitpid(worker, 0)


def pauses(context: RankContext, arguments: Arguments) -> None:
    """Three steps that are recorded as the loop does; in the second a pause, or after it a save."""
    for step in range(1, 4):
        with around("step", step=step):
            dist.all_reduce(torch.ones(4))
        if step == 2 and arguments["where"] == "in the step":
            time.sleep(1.5)
        context.trace.record("step", step=step)
        if step == 2 and arguments["where"] == "after it":
            time.sleep(1.5)


def describe_environment(context: RankContext, arguments: Arguments) -> None:
    """Record what a script made for torchrun may rely on and what the job is told; then train."""
    names = (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
        *("GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"),
        *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    )
    told = {"rank": context.rank, "world": context.world_size, "local": context.local_rank}
    told |= {"node": context.node, "attempt": context.attempt, "seed": context.seed}
    threads = list(Path("/proc/self/task").iterdir())
    of_gloo = [int(each.name) for each in threads if "gloo" in (each / "comm").read_text()]
    context.trace.record(
        "environment",
        policies=[os.sched_getscheduler(each) for each in (0, *of_gloo)],
        variables={name: os.environ.get(name) for name in names},
        has_master=bool(os.environ.get("MASTER_ADDR")) and os.environ["MASTER_PORT"].isdigit(),
        master=os.environ.get("MASTER_ADDR"),
        tmpdir=str(Path(tempfile.gettempdir()).relative_to(context.directory)),
        told=told,
        backend=dist.get_backend(),
        drawn=[float(torch.rand(1)) for _ in range(2)],
        threads=torch.get_num_threads(),
    )
    train(context, {"steps": 3})


def describe_timeouts(context: RankContext, arguments: Arguments) -> None:
    """Record the timeout of every kind of process group a job makes without naming one."""
    ranks = list(range(context.world_size))
    mesh = init_device_mesh("cpu", (context.world_size, 1), mesh_dim_names=("dp", "tp"))
    groups = {
        "default": dist.group.WORLD,
        "new_group": dist.new_group(ranks),
        "subgroups": dist.new_subgroups(1)[0],
        "mesh dp": mesh.get_group("dp"),
        "mesh tp": mesh.get_group("tp"),
    }
    seconds = {
        name: group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for name, group in groups.items()
    }
    context.trace.record("timeouts", plan=context.timeout_s, groups=seconds)
    dist.barrier()


def ignore_sigterm(context: RankContext, arguments: Arguments) -> None:
    """Like `train`, but deaf to SIGTERM, and without an end of its own."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    train(context, {"steps": 1})
    while True:
        with context.phase("data"):
            time.sleep(0.02)


def obey_sigterm(context: RankContext, arguments: Arguments) -> None:
    train(context, {"steps": 1})
    while True:
        with context.phase("data"):
            time.sleep(0.02)


def hang(context: RankContext, arguments: Arguments) -> None:
    """Rank 1 never arrives, so the others wait for it."""
    if context.rank == 1:
        time.sleep(3600)
    dist.barrier()


def fail(context: RankContext, arguments: Arguments) -> None:
    print(f"rank {context.rank} was here")
    dist.barrier()  # all were, before the peers of one that failed are ended
    if context.rank == arguments["rank"]:
        how = arguments["how"]
        if pause_s := arguments.get("leaving_s"):
            # The peer sees the connection close while this process still cleans up.
            multiprocessing.util.Finalize(None, leave_late, (pause_s,), exitpriority=0)
        if how == "raise":
            raise ValueError("no such word: 'quux'")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "signal":
            os.kill(os.getpid(), signal.SIGUSR1)
        if how == "sys.exit":
            sys.exit("there is nothing to train on")
        os._exit(arguments["code"])
    dist.barrier()


def leave_late(pause_s: float) -> None:
    dist.destroy_process_group()
    time.sleep(pause_s)


def swallow(context: RankContext, arguments: Arguments) -> None:
    """A job that goes on after whatever is thrown into its forward pass."""
    for step in range(1, 4):
        with around("step", step=step):
            try:
                with context.phase("forward"):
                    pass
            except Exception as error:
                print("ignored", error)


def have_children(context: RankContext, arguments: Arguments) -> None:
    """A child, and a daemon that left the session and was orphaned; then wait, or leave."""
    child = subprocess.Popen(["sleep", "3600"])
    child.returncode = 0  # it is not waited for on purpose
    context.trace.record("child", pid=child.pid)
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(writing, str(os.getpid()).encode())
            os.execvp("sleep", ["sleep", "3601"])
        os._exit(0)
    os.wait()
    context.trace.record("daemon", pid=int(os.read(reading, 32)))
    dist.barrier()
    train(context, {"steps": 1})
    if not arguments.get("leave"):
        time.sleep(3600)


def litter(context: RankContext, arguments: Arguments) -> None:
    Path(tempfile.mkdtemp(prefix="forgotten-")).joinpath("file").write_text("x")
    Path(f"/dev/shm/torch_{os.getpid()}_{context.rank}").write_text("x")


def forget_segments(context: RankContext, arguments: Arguments) -> None:
    """One of a child's that torch would have named, and one that this process has mapped."""
    child = os.fork()
    if child == 0:
        Path(f"/dev/shm/torch_{os.getpid()}_{context.rank}").write_text("x")
        os._exit(0)
    os.waitpid(child, 0)
    segment = shared_memory.SharedMemory(create=True, size=64)
    resource_tracker.unregister(f"/{segment.name}", "shared_memory")
    _FORGOTTEN.append(segment)
    if arguments.get("preempted"):
        sys.exit(PREEMPTED)


_FORGOTTEN: list[shared_memory.SharedMemory] = []


def use_a_segment_of_others(context: RankContext, arguments: Arguments) -> None:
    name = str(arguments["name"])
    segment = shared_memory.SharedMemory(name=name)
    resource_tracker.unregister(f"/{segment.name}", "shared_memory")
    _FORGOTTEN.append(segment)


def ignore_sigterm_and_see_a_peer_fail(context: RankContext, arguments: Arguments) -> None:
    """Rank 1 is deaf to SIGTERM; rank 0 fails of itself a moment after it was sent."""
    if context.rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.barrier()
    with context.phase("data"):
        pass
    if context.rank == 0:
        time.sleep(0.3)
        raise ValueError("rank 0 fails of itself")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(3600)


def share_memory_in_order(context: RankContext, arguments: Arguments) -> None:
    segment = shared_memory.SharedMemory(create=True, size=64)
    segment.close()
    segment.unlink()


def leave(context: RankContext, arguments: Arguments) -> None:
    """Nothing at all."""
