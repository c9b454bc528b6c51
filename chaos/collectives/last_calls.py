"""Which calls the ranks of an attempt were in at its end, and who did not come to which.

Guarantees: read from the logs that ranks leave, whatever ended them; a rank without a log says so.
A rank is named only if another waits in a call that it is a member of and has not begun, going by
the sequence numbers of that group or, of messages, of that pair of ranks. Where ranks wait for each
other in a chain, over several groups, the one at its end is named. What the backend does inside a
call is not known, nor who would answer a receive from any rank. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.recovery.collectives.log import LoggedCall, read_calls

Calls = Mapping[int, Sequence[LoggedCall]]

_COUNTERPART = {"send": "recv", "recv": "send"}
_FROM_ANY = "recv_any"


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
    """Who has not come to a call in which others wait, as a sentence; empty if nobody.

    Or who wait for each other; or who called another collective in the place of one.
    """
    waits = [wait for rank in calls for wait in _waits_of(rank, calls)]
    waiting = {wait.rank for wait in waits}
    last = [wait for wait in waits if not set(wait.missing) <= waiting]
    if last:
        wait = last[0]
        missing = [rank for rank in wait.missing if rank not in waiting]
        through = sorted({each.rank for each in waits if each.call.where != wait.call.where})
        also = f"; {_ranks(through)} {_wait(through)} for others that wait" if through else ""
        did_not = f"{_ranks(missing)} did not come to {wait.call}"
        return f"{did_not}, where rank {wait.rank} waits{also}"
    seen_waiting = {wait.rank for wait in waits if wait.call.is_waited_for}
    for wait in waits:
        missing = [rank for rank in wait.missing if rank not in seen_waiting]
        if wait.rank in seen_waiting and missing:
            own = next(each for each in waits if each.rank == missing[0])
            return (
                f"rank {missing[0]} did not come to {wait.call}, where rank {wait.rank} waits; it "
                f"has made {own.call}, to which {_ranks(own.missing)} did not come"
            )
    if waits:
        return "the ranks wait for each other: " + "; ".join(
            f"rank {rank} in {wait.call}, for {_ranks(wait.missing)}"
            for rank in sorted(waiting)
            for wait in [next(each for each in waits if each.rank == rank)]
        )
    return next(_in_the_place_of_another(calls), "")


@dataclass(frozen=True)
class _Wait:
    """That ``rank`` is in a call to which the ranks ``missing`` have not come."""

    rank: int
    call: LoggedCall
    missing: tuple[int, ...]


def _waits_of(rank: int, calls: Calls) -> Iterator[_Wait]:
    """Newest first. Of calls that a rank was seen to wait for, if there are any.

    Else of collectives: one that nobody was seen to wait for may be long done, but then all came. A
    message under way is nothing to wait for, unless it was the last that the rank did.
    """
    seen = any(call.is_waited_for for call in calls[rank])
    for call in reversed(calls[rank]):
        if not call.waits or call.operation == _FROM_ANY or (seen and not call.is_waited_for):
            continue
        if call.peer is not None and not call.is_waited_for and call is not calls[rank][-1]:
            continue
        partners = call.ranks if call.peer is None else (call.peer,)
        missing = tuple(
            other
            for other in partners
            if other != rank and other in calls and _is_behind(calls[other], rank, call)
        )
        if missing:
            yield _Wait(rank, call, missing)


def _is_behind(made: Sequence[LoggedCall], rank: int, call: LoggedCall) -> bool:
    """Whether whoever made these calls has not come to ``call`` of ``rank``."""
    if call.peer is not None and any(each.operation == _FROM_ANY for each in made):
        return False  # which may have taken any message
    own = [each.sequence for each in made if _answers(each, rank, call)]
    if not own and made and made[0].number > 1:
        return False  # its calls in the group may be older than what the log keeps
    return max(own, default=0) < call.sequence


def _answers(own: LoggedCall, rank: int, call: LoggedCall) -> bool:
    """Whether ``own`` is counted with ``call`` of ``rank``."""
    if own.where != call.where:
        return False
    if call.peer is None:
        return _is_collective(own)
    return own.peer == rank and own.operation == _COUNTERPART[call.operation]


def _is_collective(call: LoggedCall) -> bool:
    return call.peer is None and call.operation != _FROM_ANY


def _in_the_place_of_another(calls: Calls) -> Iterator[str]:
    for rank, made in calls.items():
        for call in reversed(made):
            if not call.waits or not _is_collective(call):
                continue
            for other in call.ranks:
                for own in calls.get(other, ()) if other != rank else ():
                    same = _answers(own, rank, call) and own.sequence == call.sequence
                    if same and own.operation != call.operation:
                        yield (
                            f"rank {other} called {own}, where rank {rank} called "
                            f"{call.operation} at {call.site}"
                        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _wait(ranks: Sequence[int]) -> str:
    return "wait" if len(ranks) > 1 else "waits"
