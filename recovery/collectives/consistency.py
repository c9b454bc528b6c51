"""Whether all ranks made the same calls: a check for the end of a step, and one for a save.

Guarantees: `Consistency.check` returns alike on all ranks, and raises on all if two of them called
differently since the last agreement, naming both. It talks by a group of its own that is not
observed, and by the ranks' common store, so that no call under suspicion can disturb it. As
`seatrial.recovery.guards.Guard` it keeps a checkpoint from being published after such a step.

A check costs one all-reduce of two numbers. Each rank adds the fingerprints of its groups, times
factors that add up to 0 over the ranks of a group; so the sum over all ranks is 0 if all agree, and
by chance once in 2^128 if not. Only then do the ranks tell each other what they called.

Does not see: values, a swap of calls that look alike and come from one line (`replicas` does, where
ranks hold copies), the order of calls in different groups, or messages from any rank.
A rank that waits in a call that another will not make does not come to the check.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..agreement import RanksFailed, agree
from ..checkpointable import Checkpointable
from ..errors import CollectiveMismatchError
from ..exchange import TIMEOUT_S, Exchange
from .group import ObservedGroup, Pair
from .journal import UINT64, Stream, hash64
from .mismatch import compare_all, is_root
from .observer import Observer

_LANES = 2


class Consistency:
    """Compares the calls of all ranks that ``observer`` sees.

    Made by all ranks together, after ``init_process_group``. ``timeout_s`` is how long a rank waits
    in a check for the others. ``explanations`` counts the checks in which the ranks had to tell
    each other what they called.
    """

    name = "collectives"

    def __init__(self, observer: Observer, *, timeout_s: float = TIMEOUT_S) -> None:
        self._observer = observer
        self._exchange = Exchange.from_process_group(timeout_s=timeout_s).lane("collectives")
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._factors: dict[object, tuple[int, ...]] = {}
        self._own: Any = None
        self.explanations = 0
        if self._size > 1:
            store = distributed_c10d.PrefixStore(
                "seatrial/collectives", distributed_c10d._get_default_store()
            )
            timeout = timedelta(seconds=timeout_s)
            self._own = dist.ProcessGroupGloo(store, self._rank, self._size, timeout)

    def check(self, step: int, *, counts: Sequence[int] = ()) -> list[int]:
        """Compare the calls since the last agreement; all ranks call it at the end of ``step``.

        ``counts`` are whole numbers, below 2^63, that are added up over the ranks on the same way.

        Returns:
            The sums of ``counts``.

        Raises:
            CollectiveMismatchError: on all ranks: the first call in which two of them differ.
            RuntimeError: of gloo; a rank is gone or does not come.
            CheckpointError: the other ranks could not tell what they called.
        """
        if self._own is None:
            return list(counts)
        lanes = [_signed(lane) for lane in self._fingerprints()]
        sums = torch.tensor([*lanes, *counts], dtype=torch.int64)
        self._own.allreduce([sums]).wait()
        added: list[int] = sums.tolist()
        if any(added[:_LANES]):
            self._explain(step)
        else:
            self._forget_all()
        return added[_LANES:]

    def _explain(self, step: int) -> None:
        """Have the ranks tell each other what they called, and compare it."""
        self.explanations += 1
        round_ = self._exchange.open_round("calls")
        try:
            answer = agree(
                round_, "calls", self._rank, lambda: self.testify(None), lambda all_: _judge(all_)
            )
        except RanksFailed as failed:
            raise failed.as_error(f"step {step}") from failed.__cause__
        assert isinstance(answer, dict)
        try:
            self.conclude(answer)
        except CollectiveMismatchError as error:
            raise CollectiveMismatchError(f"step {step}: {error}") from None

    # As a guard of a save.

    def testify(self, state: Checkpointable | None) -> dict[str, Any]:
        """What this rank called since the last agreement, as JSON."""
        return {
            "collectives": {
                _key(group): _facts(group, group.collectives)
                for group in self._observer.groups
                if len(group.ranks) > 1
            },
            "pairs": {
                f"{_key(group)} {pair}": _facts(group, stream) | {"sends": pair[0] == group.rank()}
                for group in self._observer.groups
                for pair, stream in group.pairs.items()
                if min(pair) >= 0 and not group.hears_anyone
            },
        }

    def judge(self, testimonies: Sequence[Any]) -> dict[str, Any]:
        return _judge(testimonies)

    def conclude(self, answer: Mapping[str, Any]) -> None:
        """Take the coordinator's answer.

        Raises:
            CollectiveMismatchError: as the answer says.
        """
        if answer["mismatch"]:
            raise CollectiveMismatchError(answer["mismatch"])
        for group in self._observer.groups:
            key = _key(group)
            stands_for = {site: other for name, site, other in answer["aliases"] if name == key}
            for signature in list(group.signatures.values()) if stands_for else ():
                if (other := stands_for.get(str(signature.site))) is not None:
                    signature.stands_for(other)
            streams = {key: group.collectives}
            streams |= {f"{key} {pair}": stream for pair, stream in group.pairs.items()}
            for name, stream in streams.items():
                if name in answer["agreed"]:
                    stream.agreed(answer["agreed"][name])
                elif group.hears_anyone and name != key:
                    stream.agreed(len(stream.recent))  # whom it concerns cannot be told

    def _fingerprints(self) -> list[int]:
        lanes = [0] * _LANES
        for group in self._observer.groups:
            size = len(group.ranks)
            if size > 1 and (value := group.collectives.fingerprint()):
                own = group.rank()
                for lane in range(_LANES):
                    lanes[lane] += self._factor(group, lane, size)[own] * value
            for pair, stream in group.pairs.items():
                if value := stream.fingerprint():
                    sign = 1 if pair[0] == group.rank() else -1
                    for lane in range(_LANES):
                        lanes[lane] += sign * self._pair_factor(group, pair, lane) * value
        return [lane & UINT64 for lane in lanes]

    def _factor(self, group: ObservedGroup, lane: int, size: int) -> tuple[int, ...]:
        """One factor for each rank of the group; their sum is 0 modulo 2^64."""
        key = (group.index, lane)
        if key not in self._factors:
            text = f"{_key(group)} {lane}"
            drawn = [hash64(f"{text} {index}") for index in range(size - 1)]
            self._factors[key] = (*drawn, -sum(drawn) & UINT64)
        return self._factors[key]

    def _pair_factor(self, group: ObservedGroup, pair: Pair, lane: int) -> int:
        key = (group.index, pair, lane)
        if key not in self._factors:
            self._factors[key] = (hash64(f"{_key(group)} {pair} {lane}"),)
        return self._factors[key][0]

    def _forget_all(self) -> None:
        for group in self._observer.groups:
            for stream in (group.collectives, *group.pairs.values()):
                stream.agreed(stream.taken)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _key(group: ObservedGroup) -> str:
    return f"{group.group_name} {group.ranks}"


def _facts(group: ObservedGroup, stream: Stream) -> dict[str, Any]:
    own = group.ranks[group.rank()]
    signatures = list(group.signatures.values())
    rooted = [each for each in signatures if "root " in each.extra]
    return {
        "name": f"{group.label} (ranks {', '.join(map(str, group.ranks))})",
        "older": stream.folded,
        "base": stream.base,
        "sequence": stream.count,
        "calls": [signature.encode() for signature in stream.recent],
        "unsettled": _is_background(stream.thread),
        "sites": sorted({str(each.site) for each in signatures}),
        "as_root": sorted({str(each.site) for each in rooted if is_root(each.extra, own)}),
        "as_other": sorted({str(each.site) for each in rooted if not is_root(each.extra, own)}),
        "members": len(group.ranks) if stream is group.collectives else 2,
    }


def _is_background(thread: int) -> bool:
    """Whether a thread of the program made the newest call, which may go on meanwhile.

    Threads of autograd are not known to Python, or as dummies.
    """
    if thread in (0, threading.get_ident()):
        return False
    others = (each for each in threading.enumerate() if each.ident == thread)
    return any(not isinstance(each, threading._DummyThread) for each in others)


def _judge(testimonies: Sequence[Any]) -> dict[str, Any]:
    try:
        aliases = compare_all(testimonies)
    except CollectiveMismatchError as error:
        return {"mismatch": str(error), "aliases": [], "agreed": {}}
    streams: dict[str, list[Mapping[str, Any]]] = {}
    for testimony in testimonies:
        for key, facts in (testimony["collectives"] | testimony["pairs"]).items():
            streams.setdefault(key, []).append(facts)
    agreed = {
        key: min(len(each["calls"]) for each in facts)
        for key, facts in streams.items()
        # What some member has not begun yet has not been compared, nor what is not kept.
        if len(facts) == facts[0]["members"] and len({each["older"] for each in facts}) == 1
    }
    return {"mismatch": "", "aliases": aliases, "agreed": agreed}
