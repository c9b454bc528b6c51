"""States to save, and ranks to save them: real forked processes, or threads where kills are not
the point."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore

from seatrial.recovery import CheckpointStore
from seatrial.recovery.checkpointable import TensorFacts
from seatrial.recovery.exchange import Exchange, StoreExchange
from seatrial.recovery.probe import listen

from .places import (  # noqa: F401  (fixtures)
    moto_place,
    moto_server,
    place,
    s3_place,
    shared_place,
    weed_server,
)
from .processes import fork  # noqa: F401


@dataclass
class PlainState:
    """The smallest `Checkpointable`."""

    live: dict[str, torch.Tensor]
    shared: dict[str, object] = field(default_factory=dict)
    own: dict[str, object] = field(default_factory=dict)
    loaded: tuple[Mapping[str, object], Mapping[int, Mapping[str, object]], int] | None = None
    prepared: list[Mapping[str, TensorFacts]] = field(default_factory=list)

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.live

    def shared_objects(self) -> dict[str, object]:
        return self.shared

    def rank_objects(self) -> dict[str, object]:
        return self.own

    def prepare(self, stored: Mapping[str, TensorFacts]) -> None:
        self.prepared.append(stored)

    def load_objects(
        self, shared: Mapping[str, object], ranks: Mapping[int, Mapping[str, object]], rank: int
    ) -> None:
        self.loaded = (shared, ranks, rank)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where a store may come to be."""
    return tmp_path / "store"


@pytest.fixture
def store(directory: Path) -> CheckpointStore:
    """An empty store in a directory, which keeps two."""
    return CheckpointStore(directory, keep_last=2)


@pytest.fixture(scope="session")
def make_state() -> Callable[..., PlainState]:
    """``make_state(seed)``: tensors of several dtypes and sizes, and some plain data."""

    def make(seed: int, rank: int = 0) -> PlainState:
        generator = torch.Generator().manual_seed(seed)
        return PlainState(
            live={
                "weight": torch.randn(40, 30, generator=generator),
                "half": torch.randn(7, generator=generator).to(torch.bfloat16),
                "count": torch.tensor(seed),
                "mask": torch.rand(9, generator=generator) > 0.5,
                "wide": torch.randn(3, generator=generator, dtype=torch.complex128),
                "none": torch.empty(0, 4),
                "turned": torch.randn(5, 6, generator=generator).t(),
            },
            shared={"lr": 0.1 * seed, "nested": [(1, b"x"), {2: None}]},
            own={"rng": torch.arange(rank, rank + 3), "rank": rank},
        )

    return make


@pytest.fixture(scope="session")
def same_tensors() -> Callable[[PlainState, PlainState], bool]:
    """Whether two states hold bitwise equal tensors."""

    def same(one: PlainState, other: PlainState) -> bool:
        return one.live.keys() == other.live.keys() and all(
            torch.equal(one.live[name], other.live[name])
            and one.live[name].dtype == other.live[name].dtype
            for name in one.live
        )

    return same


@pytest.fixture(scope="session")
def run_threads() -> Callable[..., list[Any]]:
    """``run_threads(world, work)``: ``work(rank, exchange)`` on each; results or exceptions."""

    def run(world: int, work: Callable[[int, Exchange], object], timeout_s: float = 60) -> Any:
        store = HashStore()
        results: list[object] = [None] * world

        def body(rank: int) -> None:
            exchange = StoreExchange(
                store, rank=rank, world_size=world, timeout_s=timeout_s, prefix="test"
            )
            try:
                results[rank] = work(rank, exchange)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    return run


@pytest.fixture
def fork_ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """``fork_ranks(world, work)``: ``work(rank, exchange)`` in processes of their own.

    Each result is what ``work`` returned, the exception that it raised, or minus the signal that
    killed it. When one is killed, the others are killed as well, as a launcher would.
    """
    runs = iter(range(1_000_000))

    def run(
        world: int, work: Callable[[int, Exchange], object], *, process_group: bool = False
    ) -> list[Any]:
        base = tmp_path / f"ranks-{next(runs)}"
        base.mkdir()
        with warnings.catch_warnings():
            # Newer Pythons warn about forking beside xdist's idle threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            pids = [_fork(rank, world, base, work, process_group) for rank in range(world)]
        statuses = _wait(pids)
        return [
            -os.WTERMSIG(status)
            if os.WIFSIGNALED(status)
            else pickle.loads((base / f"result-{rank}").read_bytes())
            for rank, status in enumerate(statuses)
        ]

    return run


def _fork(
    rank: int,
    world: int,
    base: Path,
    work: Callable[[int, Exchange], object],
    process_group: bool,
) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        # A rank of a test never outlives the test.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(120)
        exchange = _exchange(rank, world, base, process_group)
        try:
            result = work(rank, exchange)
        except Exception as error:
            result = error
        (base / f"result-{rank}").write_bytes(pickle.dumps(result))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _exchange(rank: int, world: int, base: Path, process_group: bool) -> Exchange:
    store = FileStore(str(base / "store"), world)
    if process_group:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        return Exchange.from_process_group(timeout_s=60)
    return StoreExchange(store, rank=rank, world_size=world, timeout_s=60, prefix="test")


def _wait(pids: list[int]) -> list[int]:
    statuses: dict[int, int] = {}
    while len(statuses) < len(pids):
        for pid in set(pids) - statuses.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pid] = status
                if os.WIFSIGNALED(status):
                    for other in set(pids) - statuses.keys():
                        os.kill(other, signal.SIGKILL)
        time.sleep(0.001)
    return [statuses[pid] for pid in pids]


@pytest.fixture
def announcements() -> Any:
    """A list of (event, edge, facts) of everything announced while the test runs."""
    seen: list[tuple[str, str, dict[str, object]]] = []
    stop = listen(lambda event, edge, facts: seen.append((event, edge, facts)))
    yield seen
    stop()
