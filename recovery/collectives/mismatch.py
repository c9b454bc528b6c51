"""Comparing what the ranks of a group called: the first call in which they differ, as a sentence.

Guarantees: only what all ranks of a group must do alike is compared. Calls of one group are
compared with each other, never the order of calls of different groups; a message is compared with
the one that the peer expects. Lines of the program may differ where the ranks take different
branches: two places are found to be in each other's stead only if each rank keeps to its own, or if
one is the place of whoever is the root and the other that of all others. Else, if both ranks call
from both places, but at different times, they are out of order.

The words are those of PyTorch's flight recorder (`MatchState` in
``torch/distributed/flight_recorder/components/types.py``); it has none for calls that differ in
their place alone, nor for one that a rank did not make. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from ..errors import CollectiveMismatchError

TYPE = "COLLECTIVE_TYPE_MISMATCH"
SIZE = "SIZE_OR_SYNTAX_MISMATCH"
DTYPE = "COLLECTIVE_DTYPE_MISMATCH"
ORDER = "COLLECTIVE_ORDER_MISMATCH"
MISSING = "COLLECTIVE_MISSING"
UNDECIDED = "UNDECIDED"

Entry = Sequence[str]
"""Operation, shapes, dtypes, the rest (reduction, root, tag) and the call site."""

Alias = tuple[str, str, str]
"""Group, a call site, and the one of another rank that it stands for."""


@dataclass(frozen=True, kw_only=True)
class Calls:
    """What one rank called in one stream since the last agreement: ``calls``, after ``older`` ones
    that only the fingerprint ``base`` is left of.

    ``sequence`` is the number of the newest. ``unsettled``: a background thread is still at it, so
    later calls may follow. ``sites`` are all places from which the rank ever called in the group,
    ``as_root`` and ``as_other`` those of calls with a root, which it was or was not.
    """

    rank: int
    older: int
    base: int
    sequence: int
    calls: Sequence[Entry]
    unsettled: bool
    sites: frozenset[str]
    as_root: frozenset[str]
    as_other: frozenset[str]


def compare_collectives(group: str, name: str, streams: Sequence[Calls]) -> list[Alias]:
    """Compare the collectives of all ranks of a group; the places that stand for each other.

    Raises:
        CollectiveMismatchError: with the first call in which two ranks differ.
    """
    aliases: dict[str, str] = {}
    if len({(each.older, each.base) for each in streams}) > 1:
        raise CollectiveMismatchError(_undecided(name, streams))
    shared = min(len(each.calls) for each in streams)
    first = streams[0]
    for position in range(shared):
        for one, other in combinations(streams, 2):
            ours, theirs = one.calls[position], other.calls[position]
            if tuple(ours) == tuple(theirs):
                continue
            state = _state(ours, theirs, one, other)
            if state is None:
                if one is first:
                    aliases[theirs[4]] = _end(aliases, ours[4])
                continue
            number = first.sequence - len(first.calls) + position + 1
            raise CollectiveMismatchError(_sentence(state, name, number, position, streams))
    if len({len(each.calls) for each in streams}) > 1:
        _require_settled(name, shared, streams)
    return [(group, site, other) for site, other in aliases.items() if site != other]


def _end(aliases: Mapping[str, str], site: str) -> str:
    while site in aliases and aliases[site] != site:
        site = aliases[site]
    return site


def _state(ours: Entry, theirs: Entry, one: Calls, other: Calls) -> str | None:
    """In which way two calls differ; None if each of their places is on its own rank alone, or is
    the one of the root, whichever rank that is."""
    for index, state in enumerate((TYPE, SIZE, DTYPE, SIZE)):
        if ours[index] != theirs[index]:
            return state
    if ours[4] not in other.sites and theirs[4] not in one.sites:
        return None
    return None if _take_turns(ours, theirs, one, other) else ORDER


def _take_turns(ours: Entry, theirs: Entry, one: Calls, other: Calls) -> bool:
    """Whether one is the root and the other is not, and whoever calls from there is so too."""
    if is_root(ours[3], one.rank) == is_root(theirs[3], other.rank):
        return False
    root, rest = ours[4], theirs[4]
    if is_root(theirs[3], other.rank):
        root, rest = rest, root
    return root not in one.as_other | other.as_other and rest not in one.as_root | other.as_root


def is_root(extra: str, rank: int) -> bool:
    """Whether a call with such further facts has that rank as its root."""
    return f"root {rank}" in extra.split(", ")


def _sentence(state: str, name: str, number: int, position: int, streams: Sequence[Calls]) -> str:
    by_call: dict[tuple[str, ...], list[int]] = {}
    for each in streams:
        entry = tuple(each.calls[position])
        by_call.setdefault(entry, []).append(each.rank)
    said = "; ".join(f"{_ranks(ranks)} called {show(entry)}" for entry, ranks in by_call.items())
    return f"{state} in group {name}, call {number}: {said}"


def _undecided(name: str, streams: Sequence[Calls]) -> str:
    older = max(each.older for each in streams)
    return (
        f"{UNDECIDED} in group {name}: the ranks differ in one of the first {older} calls since "
        "they were last compared, which are not kept; compare more often"
    )


def _require_settled(name: str, shared: int, streams: Sequence[Calls]) -> None:
    if any(each.unsettled for each in streams):
        return
    behind = [each.rank for each in streams if len(each.calls) == shared]
    ahead = next(each for each in streams if len(each.calls) > shared)
    number = ahead.sequence - len(ahead.calls) + shared + 1
    raise CollectiveMismatchError(
        f"{MISSING} in group {name}, call {number}: rank {ahead.rank} called "
        f"{show(ahead.calls[shared])}, {_ranks(behind)} did not"
    )


def compare_messages(name: str, sent: Calls, received: Calls) -> None:
    """Compare what one rank sent to another with what that one received.

    Messages that only one side has seen so far may be on their way.

    Raises:
        CollectiveMismatchError: with the first message of which they think differently.
    """
    if sent.older != received.older:
        return  # some thousand are on their way; they are compared when both sides have them
    if sent.base != received.base:
        raise CollectiveMismatchError(_undecided(name, (sent, received)))
    for position, (there, here) in enumerate(zip(sent.calls, received.calls, strict=False)):
        for index, state in ((1, SIZE), (2, DTYPE), (3, SIZE)):
            if there[index] != here[index]:
                number = sent.sequence - len(sent.calls) + position + 1
                raise CollectiveMismatchError(
                    f"{state} in group {name}, message {number} from rank {sent.rank} to rank "
                    f"{received.rank}: rank {sent.rank} called {show(there)}; "
                    f"rank {received.rank} called {show(here)}"
                )


def show(entry: Entry) -> str:
    """A call as text."""
    operation, shapes, dtypes, extra, site = entry
    facts = " ".join(filter(None, (shapes, dtypes, extra)))
    return f"{operation}({facts}) at {site}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def compare_all(testimonies: Sequence[Mapping[str, Any]]) -> list[Alias]:
    """Compare what all ranks say of all their groups; see `Consistency.testify`.

    Raises:
        CollectiveMismatchError: the first difference found.
    """
    aliases: list[Alias] = []
    for group, (name, streams) in _by_group(testimonies, "collectives").items():
        if len(streams) > 1:
            aliases += compare_collectives(group, name, streams)
    sent = dict(_pairs(testimonies, sends=True))
    for key, (name, received) in _pairs(testimonies, sends=False):
        if key in sent:
            compare_messages(name, sent[key][1], received)
    return aliases


def _by_group(
    testimonies: Sequence[Mapping[str, Any]], kind: str
) -> dict[str, tuple[str, list[Calls]]]:
    found: dict[str, tuple[str, list[Calls]]] = {}
    for rank, testimony in enumerate(testimonies):
        for group, facts in testimony[kind].items():
            found.setdefault(group, (facts["name"], []))[1].append(_calls(rank, facts))
    return found


def _pairs(
    testimonies: Sequence[Mapping[str, Any]], *, sends: bool
) -> Iterator[tuple[str, tuple[str, Calls]]]:
    for rank, testimony in enumerate(testimonies):
        for key, facts in testimony["pairs"].items():
            if facts["sends"] is sends:
                yield key, (facts["name"], _calls(rank, facts))


def _calls(rank: int, facts: Mapping[str, Any]) -> Calls:
    return Calls(
        rank=rank,
        older=facts["older"],
        base=facts["base"],
        sequence=facts["sequence"],
        calls=facts["calls"],
        unsettled=facts["unsettled"],
        sites=frozenset(facts["sites"]),
        as_root=frozenset(facts["as_root"]),
        as_other=frozenset(facts["as_other"]),
    )
