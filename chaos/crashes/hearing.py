"""Ranks of a save as threads of this process, their operations, and what they hear of each other.

Messages between ranks are seen through the key-value store that each rank is handed. A receiver has
heard of everything that the sender had done when it set the key. Torch-free; the base of both
recorders.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ChaosError
from .operations import Kind, Operation

__all__ = ["Hearing", "Messages", "Save"]


class Messages:
    """A key-value store between ranks, as `seatrial.recovery.exchange.StoreExchange` takes it."""

    def __init__(self, recorder: Hearing) -> None:
        self._recorder = recorder

    def set(self, key: str, value: bytes) -> None:
        self._recorder.say(key, value)

    def get(self, key: str) -> bytes:
        return self._recorder.hear(key)

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._recorder.said for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._recorder.said.pop(key, None) is not None


Save = Callable[[Messages], object]


class Hearing:
    """The operations of every rank, in their order."""

    def __init__(self, ranks: int) -> None:
        self.thread = threading.local()
        self.lock = threading.RLock()
        self.ranks: list[list[Operation]] = [[] for _ in range(ranks)]
        self.said: dict[str, tuple[bytes, tuple[int, int]]] = {}
        self._strange = ""

    def run(self, saves: Sequence[Save]) -> None:
        """Run ``saves[rank](messages)`` for all ranks at once; each that returns acknowledges.

        Raises:
            ChaosError: a save failed.
        """
        failures: list[BaseException] = []

        def body(rank: int) -> None:
            self.thread.rank = rank
            try:
                saves[rank](Messages(self))
                self.note(rank, "acknowledge")
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(saves))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise ChaosError(f"the save to be recorded failed: {failures[0]}") from failures[0]

    @property
    def rank(self) -> int | None:
        """The rank whose thread this is; None in a thread of no rank."""
        rank: int | None = getattr(self.thread, "rank", None)
        return rank

    def is_strange(self, what: str) -> None:
        """A thread of no rank did ``what``: no rank is known that has to wait for it."""
        self._strange = self._strange or what

    def require_no_strangers(self) -> None:
        """Raises:
        ChaosError: a thread of no rank did something that crash states depend on.
        """
        if self._strange:
            raise ChaosError(
                f"a thread that is no rank's did {self._strange}; which rank waits for it cannot "
                "be seen, so the crash states are not known. Let the thread that calls the save "
                "do it"
            )

    def note(self, rank: int, kind: Kind, **facts: Any) -> None:
        with self.lock:
            number = sum(map(len, self.ranks))
            self.ranks[rank].append(Operation(rank=rank, number=number, kind=kind, **facts))

    def heard(self, rank: int, known: tuple[int, int]) -> None:
        """``rank`` knows that another had done so many operations."""
        if known[0] != rank:
            self.note(rank, "hear", heard=known)

    def say(self, key: str, value: bytes) -> None:
        with self.lock:
            rank = self.thread.rank
            self.said[key] = (bytes(value), (rank, len(self.ranks[rank])))

    def hear(self, key: str) -> bytes:
        with self.lock:
            value, known = self.said[key]
            self.heard(self.thread.rank, known)
            return value
