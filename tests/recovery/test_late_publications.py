"""A step that is published while it is being collected as a leftover is never deleted, whenever the
collector dies. Only one live run owns a directory, but a coordinator that was taken for dead may
wake up.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seatrial.recovery.probe import interpose
from seatrial.recovery.storage.local import LocalStorage

STEP = "step-00000009"
CONTENT = b"a manifest"


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    (tmp_path / STEP / "attempt-slow").mkdir(parents=True)
    return LocalStorage(tmp_path)


class PublishesLate:
    """Publishes the step between the collector's look and its renaming; then calls ``after``."""

    def __init__(self, root: Path, after: Callable[[], None]) -> None:
        self._step, self._after = root / STEP, after

    def perform(
        self, event: str, do: Callable[[Any], Any], data: Any, lost: Any, facts: dict[str, object]
    ) -> Any:
        late = event == "storage/rename" and self._step.is_dir()
        if late:
            (self._step / "manifest.json").write_bytes(CONTENT)
        result = do(data)
        if late:
            self._after()
        return result


def collect(storage: LocalStorage) -> list[str]:
    return storage.delete(storage.leftovers(), [])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def collect_and_die(storage: LocalStorage) -> None:
    child = os.fork()
    if child == 0:
        interpose(PublishesLate(storage.root, die))
        collect(storage)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not (storage.root / STEP).exists()


def test_it_is_put_back_at_once(storage: LocalStorage) -> None:
    stop = interpose(PublishesLate(storage.root, lambda: None))
    assert collect(storage) == []
    stop()
    assert storage.published() == [9]
    assert storage.leftovers() == []


def test_the_next_collection_puts_it_back_if_the_collector_was_killed(
    storage: LocalStorage,
) -> None:
    collect_and_die(storage)
    assert collect(storage) == []
    assert storage.published() == [9]
    assert storage.read_manifest(9, 100) == CONTENT
    assert storage.leftovers() == []


def test_it_waits_for_another_attempt_that_saves_the_step(storage: LocalStorage) -> None:
    collect_and_die(storage)
    (storage.root / STEP / "attempt-new").mkdir(parents=True)
    (kept,) = [name for name in storage.leftovers() if name != STEP]
    assert storage.delete([kept], []) == []
    (storage.root / STEP / "manifest.json").write_bytes(b"another")
    assert collect(storage) == [kept]
    assert storage.read_manifest(9, 100) == b"another"
    assert storage.leftovers() == []


def test_a_leftover_that_stays_one_is_deleted_whenever_the_collector_dies(
    storage: LocalStorage,
) -> None:
    storage.root.joinpath(STEP).rename(storage.root / f".aside-{STEP}-0123")
    assert collect(storage) == [f".aside-{STEP}-0123"]
    assert list(storage.root.iterdir()) == []
