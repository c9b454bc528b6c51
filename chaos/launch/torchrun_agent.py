"""Runs one attempt, or a host's part of it, under torchrun's agent; writes down how ranks ended.

This is ``torchrun --nproc-per-node=N --max-restarts=0`` by the function that the console script
calls, ``--standalone`` or with the c10d rendezvous on the first of several hosts; only exit
statuses, which torchrun otherwise prints for people, are kept for the custodian, without those of
ranks that torchrun ended itself when another had failed: their SIGTERM says nothing of what was
done to them before. Restarting is the supervisor's, as under every launcher.

Guarantees: dies with the custodian, and its ranks with it, from their first instructions: nothing
here imports torch before that is said to the kernel.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
from pathlib import Path

from ..network.layout import INTERFACE, RENDEZVOUS_PORT, address
from .exits import exits_file
from .plan import AttemptPlan
from .processes import die_with_parent
from .torchrun_worker import AGENT


def main() -> None:
    """``python -m seatrial.chaos.launch.torchrun_agent PLAN [PARENT]``"""
    die_with_parent(int(sys.argv[2]) if len(sys.argv) > 2 else os.getppid())
    run_agent(Path(sys.argv[1]))


def warm_up() -> None:
    """Import what `run_agent` needs, for a process that is going to be forked."""
    importlib.import_module("torch.distributed.run")


def run_agent(plan_file: Path, host: int | None = None) -> None:
    """Run the attempt, or what of it is on ``host``, to its end, in a process of its own."""
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run

    plan = AttemptPlan.from_json(plan_file.read_text())
    exits: dict[int, int] = {}
    is_noted = False
    close = SubprocessContext._close

    def note_who_left_and_close(
        context: SubprocessContext, death_sig: signal.Signals, timeout: int = 30
    ) -> None:
        nonlocal is_noted
        first = (host or 0) * plan.world.ranks_per_node
        for local_rank, handler in context.subprocess_handlers.items():
            # Torchrun closes again, when it has ended the others.
            if not is_noted and (status := handler.proc.poll()) is not None:
                exits[first + local_rank] = status
        is_noted = True
        close(context, death_sig, timeout)
        if host is not None and any(exits.values()):
            # What torchrun does next goes over the network, which may be cut: it would take a
            # minute, and nobody waits for it, because the supervisor ends the attempt.
            _write(exits_file(plan, host), exits)
            os._exit(1)

    SubprocessContext._close = note_who_left_and_close  # type: ignore[assignment, method-assign]
    where = ["--standalone", "--nnodes=1"] if host is None else _on_host(plan, host)
    ranks = plan.world.ranks if host is None else plan.world.ranks_per_node
    options = [*where, f"--nproc-per-node={ranks}", "--max-restarts=0"]
    # Else it makes a directory in /tmp, and leaves it there.
    options.append(f"--log-dir={plan.directory}/torchrun")
    os.environ[AGENT] = str(os.getpid())
    failed = False
    try:
        run(parsed([*options, "-m", "seatrial.chaos.launch.torchrun_worker", str(plan_file)]))
    except ChildFailedError:
        failed = True
    _write(exits_file(plan, host), exits if failed else None)


def parsed(options: list[str]) -> argparse.Namespace:
    """``options`` as torchrun reads them, and nothing else.

    It would take what they leave out from variables ``PET_…``, which are meant for the torchrun
    that somebody starts on a whole cluster, and which a job may still look at.
    """
    from torch.distributed.run import parse_args

    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("PET_")}
    try:
        arguments: argparse.Namespace = parse_args(options)
        return arguments
    finally:
        os.environ |= hidden


def _on_host(plan: AttemptPlan, host: int) -> list[str]:
    """Options of torchrun on one of several hosts; it numbers them by the order of addresses."""
    # What goes over the interface of the host is what the faults of the network meet.
    os.environ |= {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}
    # NCCL would otherwise take hosts that share a kernel for one, and pass by the network.
    os.environ["NCCL_HOSTID"] = f"host{host}"
    return [
        f"--nnodes={plan.world.nodes}",
        f"--local-addr={address(host)}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={address(0)}:{RENDEZVOUS_PORT}",
        f"--rdzv-id={Path(plan.run_directory).name}-{plan.attempt}",
        # Told, because names of this machine are not names of its hosts.
        f"--rdzv-conf=is_host={int(host == 0)}",
    ]


def _write(path: Path, exits: dict[int, int] | None) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(exits))
    partial.rename(path)


if __name__ == "__main__":
    main()
