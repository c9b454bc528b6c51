"""Runs one attempt under torchrun's own agent and writes down how each rank ended.

This is ``torchrun --standalone --nproc-per-node=N --max-restarts=0`` by the function that the
console script calls; only the exit statuses, which torchrun otherwise prints for people, are kept
for the custodian. Restarting is the supervisor's, as under every launcher.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

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
    failed: dict[int, int] = {}
    try:
        run(parse_args(options))
    except ChildFailedError as error:
        failed = {rank: failure.exitcode for rank, failure in error.failures.items()}
    partial = Path(plan.directory) / f"{EXITS}.partial"
    partial.write_text(json.dumps(failed))
    partial.rename(Path(plan.directory) / EXITS)


if __name__ == "__main__":
    main()
