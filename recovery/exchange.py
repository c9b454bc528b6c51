"""How ranks talk while they save and restore: small messages through a store, never collectives.

Guarantees: messages of one round cannot be taken for those of another, even when a rank left a
round early; a wait that ends says which ranks are missing; the store does not grow, because the
coordinator deletes what every rank has read. A message is at most limited by memory (it is cut into
parts that fit `TCPStore`).

Does not: detect dead ranks before the timeout (the launcher does), or start any thread. All ranks
open the same rounds in the same order, on each lane by itself: rounds that go on in a background
thread have a lane of their own. Rank 0 is the coordinator. Collectives are avoided because a
failing rank must be able to say so, and because a save must not interleave with the job's own.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from .errors import CheckpointError, SilentRanksError

__all__ = ["Exchange", "Round", "SoloExchange", "StoreExchange", "await_keys"]

COORDINATOR = 0
TIMEOUT_S = 300.0

# FileStore and TCPStore wait in steps of 10 ms or more; polling sooner keeps small saves small.
_POLL_S_MIN = 0.0005
_POLL_S_MAX = 0.01
# TCPStore's libuv server drops a client that sends more than 8 MiB at once.
_PART_BYTES = 4 << 20

_instances = itertools.count()
_T = TypeVar("_T")


class KeyValueStore(Protocol):
    """What is used of `torch.distributed.Store`."""

    # torch's stub says str; its binding takes bytes as well.
    def set(self, key: str, value: Any, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


def await_keys(store: KeyValueStore, keys: list[str], timeout_s: float) -> list[str]:
    """Those of ``keys`` that are not there when ``timeout_s`` is over; empty as soon as all are."""
    deadline = time.monotonic() + timeout_s
    pause_s = _POLL_S_MIN
    while not store.check(keys):
        if time.monotonic() >= deadline:
            return [key for key in keys if not store.check([key])]
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.25, _POLL_S_MAX)
    return []


class Round(ABC):
    """One save or restore: each tag is posted once by every rank, or announced once."""

    @abstractmethod
    def post(self, tag: str, payload: bytes) -> None:
        """Send this rank's part to the coordinator."""

    @abstractmethod
    def collect(self, tag: str) -> list[bytes]:
        """On the coordinator: the parts of all ranks, in rank order, once all have posted.

        Raises:
            CheckpointError: some ranks did not post in time; the message names them.
        """

    @abstractmethod
    def announce(self, tag: str, payload: bytes) -> None:
        """On the coordinator: send to all ranks."""

    @abstractmethod
    def receive(self, tag: str) -> bytes:
        """On every rank: what the coordinator announced.

        Raises:
            CheckpointError: nothing was announced in time.
        """

    def gather(self, tag: str, payload: bytes) -> list[bytes] | None:
        """`post`, and on the coordinator `collect`."""
        self.post(tag, payload)
        return self.collect(tag) if self.is_coordinator else None

    @property
    @abstractmethod
    def is_coordinator(self) -> bool: ...


class Exchange(ABC):
    """Opens rounds for one rank of ``world_size``."""

    rank: int
    world_size: int

    @property
    def is_coordinator(self) -> bool:
        return self.rank == COORDINATOR

    @abstractmethod
    def open_round(self, kind: str) -> Round:
        """Begin the next round of ``kind``. Every rank opens the same rounds in the same order."""

    @abstractmethod
    def lane(self, name: str) -> Exchange:
        """An exchange between the same ranks whose rounds may go on beside those of this one.

        One thread at a time uses a lane. Every rank makes the same lanes; one name, one lane.
        """

    @staticmethod
    def from_process_group(*, timeout_s: float = TIMEOUT_S) -> Exchange:
        """Over the store of the default process group; alone where there is no process group.

        ``timeout_s`` is how long a rank waits for the others, so at least the longest time by
        which one rank's writing or reading may take longer than another's.
        """
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return SoloExchange()
        store = PrefixStore("seatrial/exchange", _get_default_store())
        return StoreExchange(
            store, rank=dist.get_rank(), world_size=dist.get_world_size(), timeout_s=timeout_s
        )


class SoloExchange(Exchange):
    """World size 1: whatever is posted is collected in place."""

    rank = COORDINATOR
    world_size = 1

    def open_round(self, kind: str) -> Round:
        return _SoloRound()

    def lane(self, name: str) -> Exchange:
        return self


class _SoloRound(Round):
    is_coordinator = True

    def __init__(self) -> None:
        self._messages: dict[str, bytes] = {}

    def post(self, tag: str, payload: bytes) -> None:
        self._messages[tag] = payload

    def collect(self, tag: str) -> list[bytes]:
        return [self._messages.pop(tag)]

    announce = post

    def receive(self, tag: str) -> bytes:
        return self._messages.pop(tag)


class StoreExchange(Exchange):
    """Over any `torch.distributed.Store` that all ranks share.

    Exchanges on one store must have different prefixes; those without one are told apart by the
    order of their first use in this process, which has to be the same on every rank.
    """

    def __init__(
        self,
        store: KeyValueStore,
        *,
        rank: int,
        world_size: int,
        timeout_s: float = TIMEOUT_S,
        prefix: str | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._timeout_s = timeout_s
        self._prefix = prefix
        self._rounds = 0
        self._announced: list[str] = []

    def open_round(self, kind: str) -> Round:
        self._rounds += 1
        return _StoreRound(self, f"{self._own_prefix()}/{self._rounds}/{kind}", self._timeout_s)

    def lane(self, name: str) -> Exchange:
        return StoreExchange(
            self._store,
            rank=self.rank,
            world_size=self.world_size,
            timeout_s=self._timeout_s,
            prefix=f"{self._own_prefix()}/{name}",
        )

    def _own_prefix(self) -> str:
        if self._prefix is None:
            self._prefix = f"#{next(_instances)}"
        return self._prefix

    def put(self, key: str, payload: bytes) -> None:
        """Set ``key``; it becomes visible after all its parts."""
        parts = range(_PART_BYTES, len(payload), _PART_BYTES)
        for number, start in enumerate(parts):
            self._store.set(f"{key}#{number}", payload[start : start + _PART_BYTES])
        self._store.set(key, b"%d:" % len(parts) + payload[:_PART_BYTES])

    def take(self, key: str) -> tuple[bytes, list[str]]:
        """The payload of a key that is there, and every key that holds a part of it."""
        count, _, first = self._store.get(key).partition(b":")
        keys = [f"{key}#{number}" for number in range(int(count))]
        return first + b"".join(self._store.get(part) for part in keys), [key, *keys]

    def missing(self, keys: list[str], timeout_s: float) -> list[str]:
        """The keys that are not there when ``timeout_s`` is over; empty as soon as all are."""
        return await_keys(self._store, keys, timeout_s)

    def will_delete(self, keys: list[str]) -> None:
        """Delete announced ``keys`` once every rank has posted again, and so has read them."""
        self._announced += keys

    def delete(self, keys: list[str]) -> None:
        """Delete collected ``keys``, and what was announced before they were posted."""
        for key in (*keys, *self._announced):
            self._store.delete_key(key)
        self._announced = []


class _StoreRound(Round):
    def __init__(self, exchange: StoreExchange, prefix: str, timeout_s: float) -> None:
        self._exchange = exchange
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._own: dict[str, bytes] = {}

    @property
    def is_coordinator(self) -> bool:
        return self._exchange.is_coordinator

    def post(self, tag: str, payload: bytes) -> None:
        if self.is_coordinator:
            self._own[tag] = payload
        else:
            key = f"{self._prefix}/{tag}/{self._exchange.rank}"
            _guarded(lambda: self._exchange.put(key, payload))

    def collect(self, tag: str) -> list[bytes]:
        others = range(1, self._exchange.world_size)
        keys = {f"{self._prefix}/{tag}/{rank}": rank for rank in others}
        missing = _guarded(lambda: self._exchange.missing(list(keys), self._timeout_s))
        if missing:
            ranks = ", ".join(str(keys[key]) for key in missing)
            raise SilentRanksError(
                f"rank {ranks} did not report ({tag!r}) within {self._timeout_s:g} s; it may have "
                "died or hang, or be slower than the store's timeout_s allows",
                tuple(keys[key] for key in missing),
            )
        payloads, used = [self._own[tag]], []
        for key in keys:
            payload, parts = _guarded(partial(self._exchange.take, key))
            payloads.append(payload)
            used += parts
        _guarded(lambda: self._exchange.delete(used))
        return payloads

    def announce(self, tag: str, payload: bytes) -> None:
        self._own[tag] = payload
        key = f"{self._prefix}/{tag}"
        _guarded(lambda: self._exchange.put(key, payload))
        self._exchange.will_delete(
            [key, *(f"{key}#{n}" for n in range(max(0, (len(payload) - 1) // _PART_BYTES)))]
        )

    def receive(self, tag: str) -> bytes:
        if self.is_coordinator:
            return self._own[tag]
        key = f"{self._prefix}/{tag}"
        if _guarded(lambda: self._exchange.missing([key], self._timeout_s)):
            raise CheckpointError(
                f"rank {self._exchange.rank} heard nothing ({tag!r}) from the coordinator, rank "
                f"{COORDINATOR}, within {self._timeout_s:g} s; it may have died or hang"
            )
        return _guarded(lambda: self._exchange.take(key))[0]


def _guarded(use: Callable[[], _T]) -> _T:
    """What ``use`` returns; the store's own failures become `CheckpointError`."""
    try:
        return use()
    except RuntimeError as error:  # torch's DistStoreError and its kin
        raise CheckpointError(
            f"the ranks' common store failed ({error}); its host, mostly rank {COORDINATOR}, may "
            "have died"
        ) from error
