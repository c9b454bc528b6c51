"""What is gathered from the ranks of a hung attempt before they are killed, for the report.

Python stacks, flight recorders and, where no fault explains the hang, native stacks, which take a
second. Torch-free.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from .flight_recorder import ask_for_flight_records, record_file
from .inject import pid_file
from .launch.launcher import Launcher
from .launch.plan import AttemptPlan
from .native_stacks import native_stacks
from .stacks import ask_for_stacks
from .stillness import is_stopped


def look_at_hang(plan: AttemptPlan, launcher: Launcher, *, is_explained: bool) -> tuple[str, ...]:
    """Lines for the report; files beside them are in the attempt's directory."""
    alive = set(launcher.processes())
    processes = {rank: pid for rank, pid in _processes(plan).items() if pid in alive}
    stopped = [rank for rank, pid in processes.items() if is_stopped(pid)]
    answering = [rank for rank in processes if rank not in stopped]
    directory = Path(plan.directory)
    lines = ask_for_stacks(plan, launcher, answering)
    lines += ask_for_flight_records({r: record_file(directory, r) for r in answering}, launcher)
    lines += tuple(f"rank {rank} is stopped, and answers nothing" for rank in stopped)
    if not is_explained:
        lines += native_stacks(processes, directory)
    return lines


def _processes(plan: AttemptPlan) -> dict[int, int]:
    found = {}
    for rank in range(plan.world.ranks):
        with contextlib.suppress(FileNotFoundError, ValueError):
            found[rank] = int(pid_file(Path(plan.directory), rank).read_text())
    return found
