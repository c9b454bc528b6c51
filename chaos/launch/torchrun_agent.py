"""Runs one attempt under torchrun's own agent and writes down how each rank ended.

This is ``torchrun --standalone --nproc-per-node=N --max-restarts=0`` by the function that the
console script calls; only exit statuses, which torchrun otherwise prints for people, are kept
for the custodian, without those of ranks that torchrun ended itself when another had failed: their
SIGTERM says nothing of what was done to them before. Restarting is the supervisor's, as under every
launcher.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from .custodian import EXITS
from .plan import AttemptPlan
from .processes import die_with_parent


def main() -> None:
    """``python -m seatrial.chaos.launch.torchrun_agent PLAN``"""
    die_with_parent(os.getppid())
    plan = AttemptPlan.from_json(Path(sys.argv[1]).read_text())
    options = ["--standalone", "--nnodes=1", f"--nproc-per-node={plan.world.ranks}"]
    options += ["--max-restarts=0", "-m", "seatrial.chaos.launch.worker", sys.argv[1]]
    failed: dict[int, int] | None = None
    ended_by_torchrun: set[int] = set()
    close = SubprocessContext._close

    def note_who_is_left_and_close(
        context: SubprocessContext, death_sig: signal.Signals, timeout: int = 30
    ) -> None:
        handlers = context.subprocess_handlers.items()
        ended_by_torchrun.update(r for r, handler in handlers if handler.proc.poll() is None)
        close(context, death_sig, timeout)

    SubprocessContext._close = note_who_is_left_and_close  # type: ignore[assignment, method-assign]
    try:
        run(parse_args(options))
    except ChildFailedError as error:
        failures = error.failures.items()
        failed = {r: failure.exitcode for r, failure in failures if r not in ended_by_torchrun}
    partial = Path(plan.directory) / f"{EXITS}.partial"
    partial.write_text(json.dumps(failed))
    partial.rename(Path(plan.directory) / EXITS)


if __name__ == "__main__":
    main()
