"""A rank's first instructions under torchrun: it dies with its agent, and only then becomes a rank.

Guarantees: a rank whose agent is gone does not live on, though the agent died before the rank could
ask who it was. Torch-free until then: torch takes seconds to import.
"""

from __future__ import annotations

import os

from .processes import die_with_parent

AGENT = "SEATRIAL_AGENT"
"""The variable in which an agent tells its ranks its process id."""


def main() -> None:
    """``python -m seatrial.chaos.launch.torchrun_worker PLAN``"""
    die_with_parent(int(os.environ.pop(AGENT)))
    from .worker import main as work

    work()


if __name__ == "__main__":
    main()
