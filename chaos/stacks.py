"""Where every rank of a hung attempt was: its Python stack.

Guarantees: asking changes nothing in a rank but that it writes to a file of its own; a rank that
does not answer in time, because it is stopped, gone, or has a handler of its own for the signal, is
said to be silent. Works while the rank waits in C++, without the GIL. Torch-free.
"""

from __future__ import annotations

import faulthandler
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .launch.launcher import Launcher
    from .launch.plan import AttemptPlan

_SIGNAL = signal.SIGUSR2
_PATIENCE_S = 1.0
_FRAMES = 12


def answer_with_stacks(path: Path) -> None:
    """In a rank: write the stacks of all threads to ``path`` when it is asked."""
    # The file stays open: nothing may be opened in the handler.
    faulthandler.register(_SIGNAL, file=path.open("w"), all_threads=True)


def ask_for_stacks(plan: AttemptPlan, launcher: Launcher, ranks: Sequence[int]) -> tuple[str, ...]:
    """The stack of the thread of each rank that took the signal, mostly its main one, as lines.

    Only ``ranks`` are asked.
    """
    files = {rank: plan.stacks_file(rank) for rank in range(plan.world.ranks)}
    answering = [rank for rank in ranks if files[rank].exists()]
    for rank in answering:
        launcher.signal(rank, _SIGNAL)
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline and not all(_is_whole(files[rank]) for rank in answering):
        time.sleep(0.01)
    return tuple(line for rank, path in files.items() for line in _lines(rank, path))


def _is_whole(path: Path) -> bool:
    """Whether the stack of the thread that was signalled, which comes last, is there."""
    text = path.read_text(errors="replace")
    return "Current thread" in text and text.endswith("\n")


def _lines(rank: int, path: Path) -> list[str]:
    text = path.read_text(errors="replace") if path.exists() else ""
    stacks = [each for each in text.split("\n\n") if each.strip()]
    current = next((each for each in stacks if each.startswith("Current thread")), "")
    if not current:
        return [f"rank {rank}: no stack, it did not answer"]
    frames = [line.strip() for line in current.splitlines()[1:]]
    more = [f"… and {len(frames) - _FRAMES} more"] if len(frames) > _FRAMES else []
    return [f"rank {rank}, newest frame first:", *(f"    {f}" for f in frames[:_FRAMES] + more)]
