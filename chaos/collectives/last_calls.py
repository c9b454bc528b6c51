"""Which calls the ranks of an attempt were in at its end, and who did not come to which.

Guarantees: read from the logs that ranks leave, whatever ended them; a rank without a log says so.
A rank is behind only if another waits in a call that it is a member of and has not begun; what the
backend does inside a call is not known. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from seatrial.recovery.collectives.log import LoggedCall, read_calls

Calls = Mapping[int, Sequence[LoggedCall]]


def read_all(logs: Mapping[int, Path]) -> dict[int, list[LoggedCall]]:
    """The newest calls of each rank."""
    return {rank: read_calls(path) for rank, path in logs.items()}


def last_calls(calls: Calls) -> list[str]:
    """A line for each rank: its newest call."""
    return [
        f"rank {rank}: last call {made[-1]}" if made else f"rank {rank}: no call was recorded"
        for rank, made in calls.items()
    ]


def behind(calls: Calls) -> str:
    """Who has not come to a collective in which others wait, as a sentence; empty if nobody.

    Or who called another one in its place.
    """
    for rank, made in calls.items():
        for call in reversed(made):
            if not call.waits or call.peer is not None:
                continue
            others = [other for other in call.ranks if other != rank and other in calls]
            missing = [other for other in others if _is_behind(calls[other], call)]
            if missing:
                ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
                return f"{ranks} did not come to {call}, where rank {rank} waits"
            for other in others:
                instead = [c for c in _in_group(calls[other], call) if c.sequence == call.sequence]
                if instead and instead[0].operation != call.operation:
                    return (
                        f"rank {other} called {instead[0]}, where rank {rank} called "
                        f"{call.operation} at {call.site}"
                    )
    return ""


def _is_behind(made: Sequence[LoggedCall], call: LoggedCall) -> bool:
    own = [each.sequence for each in _in_group(made, call)]
    if not own and made and made[0].number > 1:
        return False  # its calls in the group may be older than what the log keeps
    return max(own, default=0) < call.sequence


def _in_group(made: Sequence[LoggedCall], call: LoggedCall) -> list[LoggedCall]:
    """The collectives of a rank in the group of ``call``."""
    group = (call.group, call.ranks)
    return [each for each in made if each.peer is None and (each.group, each.ranks) == group]
