"""The store of one attempt: torch's file store in all but how soon it looks."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from seatrial.chaos.launch.rendezvous import EagerFileStore
from seatrial.recovery import exchange

LIMIT = timedelta(milliseconds=200)


def file_store(path: Path, ranks: int = 1) -> Any:
    return dist.FileStore(str(path), ranks)  # type: ignore[attr-defined]


def answers(store: Any, *, direct: bool) -> Iterator[object]:
    """What a store says to everything that it can be asked."""
    store.set_timeout(LIMIT)
    store.set("text", "1")
    yield store.get("text")
    store.set("bytes", b"\xff\x00\x01")
    yield store.get("bytes")
    yield store.add("sum", 3)
    yield store.add("sum", -1)
    yield store.check(["text", "absent"])
    yield store.check(["text", "sum"])
    yield store.compare_set("text", "1", "2")
    yield store.compare_set("text", "9", "3")
    store.append("text", "x")
    yield store.get("text")
    store.multi_set(["p", "q"], ["8", "9"])
    yield store.multi_get(["p", "q"])
    yield store.num_keys()
    # Torch lets no store in Python list its keys through another.
    yield sorted(store.list_keys()) if direct else None
    yield store.delete_key("p")
    yield store.check(["p"])
    yield store.clone().get("q")
    store.wait(["text"])
    store.wait(["text", "q"], LIMIT)
    yield store.has_extended_api()
    for asks in (
        lambda: store.get("absent"),
        lambda: store.wait(["absent"]),
        lambda: store.wait(["absent", "text"], LIMIT),
    ):
        with pytest.raises(RuntimeError):
            asks()


@pytest.mark.parametrize("prefix", ["", "group"])
def test_it_says_what_the_file_store_says(tmp_path: Path, prefix: str) -> None:
    theirs = file_store(tmp_path / "theirs")
    ours = EagerFileStore(file_store(tmp_path / "ours"))
    said = []
    for store in (theirs, ours):
        asked = dist.PrefixStore(prefix, store) if prefix else store
        said.append(list(answers(asked, direct=not prefix)))
    assert said[0] == said[1]


def test_two_of_one_file_share_their_keys(tmp_path: Path) -> None:
    one, other = (EagerFileStore(file_store(tmp_path / "store", 2)) for _ in range(2))
    one.set("key", "value")
    assert other.get("key") == b"value"


def test_who_waits_is_told_what_is_missing(tmp_path: Path) -> None:
    store = EagerFileStore(file_store(tmp_path / "store"))
    store.set("there", "")
    with pytest.raises(dist.DistStoreError, match=r"no rank has set absent in 0:00:00\.2"):
        store.wait(["there", "absent"], LIMIT)


def test_who_waits_looks_again_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (EagerFileStore(file_store(tmp_path / "store", 2)) for _ in range(2))
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 20:
            one.set("key", "value")

    monkeypatch.setattr(exchange.time, "sleep", sleep)
    other.wait(["key"])
    assert len(pauses) == 20
    assert pauses[0] <= 0.001
    assert pauses == sorted(pauses)
    assert pauses[-1] == 0.01  # as torch's, in the end
