"""How ranks under torchrun ended, as far as it can be known. Torch-free.

torchrun's agent says it of ranks that left by themselves; those that it ended may have written it
down; those whose agent was killed are the custodian's to reap.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from ..inject import pid_file
from ..trace import read_last
from .plan import AttemptPlan

_DYING_S = 2.0


def exits_file(plan: AttemptPlan, host: int | None) -> Path:
    """Where a torchrun agent leaves how its ranks ended by themselves; null: all went well."""
    return Path(plan.directory) / ("exits.json" if host is None else f"exits-host{host}.json")


def torchrun_exits(
    plan: AttemptPlan, ranks: range, host: int | None, agent_status: int
) -> dict[int, int | None]:
    """How the ``ranks`` of an agent ended: as torchrun says, or else as they wrote down themselves.

    A rank that did neither was ended by torchrun itself, which sends SIGTERM when another fails.
    """
    try:
        blamed = json.loads(exits_file(plan, host).read_text())
    except FileNotFoundError:
        orphans = {rank: _orphan_status(plan, rank) for rank in ranks}
        return {rank: agent_status or 1 if s is None else s for rank, s in orphans.items()}
    if blamed is None:
        return dict.fromkeys(ranks, 0)
    exits: dict[int, int | None] = {int(rank): code for rank, code in blamed.items()}
    for rank in set(ranks) - exits.keys():
        exits[rank] = _own_status(plan.trace_file(rank))
    return exits


def _orphan_status(plan: AttemptPlan, rank: int) -> int | None:
    """How a rank ended whose agent was killed, which makes it a child of this process."""
    deadline = time.monotonic() + _DYING_S
    with contextlib.suppress(FileNotFoundError, ChildProcessError, ValueError):
        pid = int(pid_file(Path(plan.directory), rank).read_text())
        while time.monotonic() < deadline:
            reaped, raw = os.waitpid(pid, os.WNOHANG)
            if reaped:
                return os.waitstatus_to_exitcode(raw)
            time.sleep(0.01)
    return None


def _own_status(trace: Path) -> int | None:
    if ended := read_last(trace, "ended"):
        return int(str(ended["status"]))
    return 1 if read_last(trace, "error") else None
