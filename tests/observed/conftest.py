"""A disk that observes, and this process as a rank on it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from evidence import Evidence, uninterrupted
from on_disk import Armed, OnDisk

from seatrial.chaos.errors import UsageError
from seatrial.chaos.inject import Injector, Position
from seatrial.chaos.ledger import Ledger
from seatrial.chaos.powerloss import PowerDisk, check_kind, open_disk
from seatrial.chaos.schedule import Schedule
from seatrial.chaos.storage import arm
from seatrial.chaos.storage.arming import ENVIRONMENT
from seatrial.chaos.trace import TraceWriter
from seatrial.recovery.probe import listen


@pytest.fixture
def reference(tmp_path: Path) -> Evidence:
    """Six steps, and nothing was done to them."""
    return uninterrupted(tmp_path / "reference")


@pytest.fixture(scope="session")
def observing_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PowerDisk]:
    try:
        check_kind("fuse", "--chaos-disk")
    except UsageError as error:
        pytest.skip(str(error))
    disk = open_disk("fuse", tmp_path_factory.mktemp("observing") / "disk", loses_power=False)
    yield disk
    disk.close()


@pytest.fixture
def armed(observing_disk: PowerDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Armed:
    """``with armed(schedule) as on_disk``: this process is rank 0 of a run."""
    monkeypatch.delenv(ENVIRONMENT, raising=False)

    @contextmanager
    def body(schedule: str) -> Iterator[OnDisk]:
        store = observing_disk.root / secrets.token_hex(4)
        store.mkdir()
        run = tmp_path / "run"
        for name in ("strikes", "traces"):
            (run / name).mkdir(parents=True)
        trace = run / "traces" / "attempt1-rank0.jsonl"
        position = Position(
            rank=0, world_size=1, ranks_per_node=1, attempt=1, store=str(store), pids=run
        )
        writer = TraceWriter(trace)
        injector = Injector(Schedule.parse(schedule), position, Ledger(run / "strikes"), writer)
        stop = listen(injector)
        end = arm(injector, position, strikes=run / "strikes", trace=trace)
        try:
            yield OnDisk(store, trace)
        finally:
            end()
            stop()
            writer.close()
            observing_disk.part()

    return body
