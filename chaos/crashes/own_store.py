"""The crash states of this project's own store: a save by any number of ranks, and its restore.

A tiny state is enough: the order of operations does not depend on its size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from seatrial.recovery.checkpointable import TensorFacts
from seatrial.recovery.directory import CheckpointDirectory
from seatrial.recovery.exchange import SoloExchange, StoreExchange
from seatrial.recovery.restoring import Restorer
from seatrial.recovery.storage import is_url, open_storage
from seatrial.recovery.storage.objects import Objects, ObjectStorage
from seatrial.recovery.store import CheckpointStore

from .operations import Recording
from .recorder import Messages, record
from .requests import record_objects

__all__ = ["SmallState", "record_store", "restore"]


class SmallState:
    """Tensors alone, and a word for every rank."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.live = tensors

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.live

    def shared_objects(self) -> dict[str, object]:
        return {"progress": 1}

    def rank_objects(self) -> dict[str, object]:
        return {"rng": b"x"}

    def prepare(self, stored: Mapping[str, TensorFacts]) -> None:
        pass

    def load_objects(self, *_: object) -> None:
        pass


def record_store(
    place: Path | str, *, ranks: int, options: Mapping[str, object] | None = None
) -> Recording:
    """The save of step 2 by all ranks into a store that holds step 1.

    ``place`` is a new directory, or the URL of an object store, with its ``options``; what is
    recorded is then requests instead of operations on files. ``memory://NAME`` needs no server.
    """

    def save(rank: int, step: int) -> Callable[[Messages], object]:
        def run(messages: Messages) -> object:
            exchange = StoreExchange(messages, rank=rank, world_size=ranks, prefix="x")
            tensors = {f"w{rank}": torch.full((8,), float(step + rank))}
            store = CheckpointStore(place, exchange=exchange, keep_last=4, storage_options=options)
            return store.save(SmallState(tensors), step=step)

        return run

    if isinstance(place, str) and is_url(place):
        record_objects(place, [save(rank, 1) for rank in range(ranks)], options=options)
        return record_objects(place, [save(rank, 2) for rank in range(ranks)], options=options)
    root = Path(place)
    root.mkdir()
    record(root, [save(rank, 1) for rank in range(ranks)])
    return record(root, [save(rank, 2) for rank in range(ranks)])


def restore(ranks: int) -> Callable[[Path | Objects], int | None]:
    """Restores with this project's code and looks at every value; the step, or None."""

    def run(place: Path | Objects) -> int | None:
        state = SmallState({f"w{rank}": torch.zeros(8) for rank in range(ranks)})
        storage = open_storage(place) if isinstance(place, Path) else ObjectStorage(place)
        found = Restorer(CheckpointDirectory(storage), SoloExchange()).restore(state, step=None)
        if found is None:
            return None
        step = found.manifest.step
        for rank in range(ranks):
            assert bool((state.live[f"w{rank}"] == step + rank).all()), (
                f"wrong bytes of rank {rank}"
            )
        return step

    return run
