"""Ranks that may be exchanged: when they are, and that nothing is missed when one of many equal
states is tried."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crash_protocols import record_pointer, without

from seatrial.chaos.crashes.disk import MODELS, Model
from seatrial.chaos.crashes.explore import explore, explore_objects
from seatrial.chaos.crashes.operations import Operation, Recording
from seatrial.chaos.crashes.own_store import record_store
from seatrial.chaos.crashes.recorder import Messages, record
from seatrial.chaos.crashes.symmetry import symmetry_of
from seatrial.chaos.errors import ChaosError
from seatrial.recovery.storage.objects import Objects

RANKS = 3


def write(path: Path, content: bytes, *, fsync: bool = True) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(content)
        if fsync:
            os.fsync(file.fileno())


def fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def hear(messages: Messages, key: str) -> None:
    while not messages.check([key]):
        time.sleep(0.001)
    messages.get(key)


def record_shards(root: Path, *, fsync: bool = True, odd: str = "") -> Recording:
    """Every rank writes a shard, and rank 0 a file ``done`` when it has heard from all.

    ``odd`` is what the last rank does differently.
    """
    root.mkdir()

    def save(rank: int) -> Callable[[Messages], object]:
        is_odd = rank == RANKS - 1

        def run(messages: Messages) -> None:
            if is_odd and odd == "knowledge":
                hear(messages, "done0")
            content = b"new" * (2 if is_odd and odd == "length" else 1) + bytes([rank])
            write(root / f"shard-{rank}", content, fsync=fsync)
            fsync_directory(root)
            if is_odd and odd == "order":
                write(root / "extra", b"x")
            messages.set(f"done{rank}", b"")
            if rank == 0:
                for other in range(1, RANKS):
                    hear(messages, f"done{other}")
                write(root / "done", b"yes")
                fsync_directory(root)
                messages.set("over", b"")
            hear(messages, "over")

        return run

    return record(root, [save(rank) for rank in range(RANKS)])


def load(root: Path) -> int:
    """Looks at every shard, whichever rank's it is, in the same way."""
    if not (root / "done").exists() or (root / "done").read_bytes() != b"yes":
        return 1
    for rank in range(RANKS):
        if (root / f"shard-{rank}").read_bytes() != b"new" + bytes([rank]):
            raise ValueError("a shard is damaged")
    return 2


def explored(
    recording: Recording, model: Model, *, symmetric: bool
) -> tuple[int, int | None, set[str]]:
    found = explore(
        recording, load, old=1, new=2, model=model, look="everything", symmetric=symmetric
    )
    assert (found.counterexample, found.complete) == (None, True)
    return found.runs, found.states, set(found.outcomes)


@pytest.mark.parametrize("model", MODELS)
def test_the_same_states_are_covered_by_fewer_runs(tmp_path: Path, model: Model) -> None:
    recording = record_shards(tmp_path / "root")
    assert symmetry_of(recording).classes == ((1, 2),)
    runs, states, outcomes = explored(recording, model, symmetric=False)
    fewer, same_states, same_outcomes = explored(recording, model, symmetric=True)
    assert (same_states, same_outcomes) == (states, outcomes)
    assert fewer < 0.7 * runs


def test_how_the_states_were_covered_is_said_in_one_line(tmp_path: Path) -> None:
    recording = record_shards(tmp_path / "root")
    found = explore(
        recording, load, old=1, new=2, model="journal", look="everything", symmetric=True
    )
    assert str(found) == (
        f"journal: {found.states} states are covered; recovery ran {found.runs} times; "
        "ranks 1, 2 were exchanged"
    )
    lazily = explore(recording, load, old=1, new=2, model="journal")
    assert str(lazily) == (
        "journal: every state that recovery can tell apart is covered; recovery ran "
        f"{lazily.runs} times"
    )


def test_what_breaks_recovery_is_found_all_the_same(tmp_path: Path) -> None:
    recording = record_shards(tmp_path / "root", fsync=False)
    for symmetric in (False, True):
        found = explore(
            recording, load, old=1, new=2, model="weak", look="everything", symmetric=symmetric
        )
        assert found.counterexample is not None
        assert found.counterexample.reason == "recovery fails: ValueError: a shard is damaged"


@pytest.mark.parametrize("odd", ["length", "order", "knowledge"])
def test_ranks_that_differ_in_anything_are_not_exchanged(tmp_path: Path, odd: str) -> None:
    assert symmetry_of(record_shards(tmp_path / "root", odd=odd)).classes == ()


@pytest.mark.parametrize(
    ("names", "alike"),
    [
        (["shard-9.bin", "shard-10.bin"], True),
        (["shard", "index"], False),
        (["shard-0", "index-1"], False),
        (["0.bin", "1.json"], False),
        (["part-0", "part-0-of-2"], False),
    ],
)
def test_ranks_whose_names_differ_in_more_than_numbers_are_not_exchanged(
    names: list[str], alike: bool
) -> None:
    files = [
        [
            Operation(rank=rank, number=2 * rank, kind="create", path=name, node=rank + 1),
            Operation(rank=rank, number=2 * rank + 1, kind="fsync", path=name, node=rank + 1),
        ]
        for rank, name in enumerate(names)
    ]
    assert symmetry_of(Recording(files)).classes == (((0, 1),) if alike else ())
    below = [
        [
            Operation(rank=rank, number=2 * rank, kind="mkdir", path=name, node=rank + 1),
            Operation(
                rank=rank, number=2 * rank + 1, kind="create", path=f"{name}/x", node=rank + 3
            ),
        ]
        for rank, name in enumerate(names)
    ]
    assert symmetry_of(Recording(below)).classes == (((0, 1),) if alike else ())


@pytest.mark.parametrize("symmetric", [False, True])
def test_an_index_without_its_shard_is_found_though_both_are_written_alike(
    symmetric: bool,
) -> None:
    recording = Recording(
        [
            [Operation(rank=rank, number=rank, kind="put", path=name, node=rank + 1, request=rank)]
            for rank, name in enumerate(["shard", "index"])
        ]
    )

    def recover(objects: Objects) -> int:
        if "index" not in objects.sizes():
            return 1
        objects.get("shard", 9)
        return 2

    found = explore_objects(recording, recover, old=1, new=2, symmetric=symmetric)
    assert found.counterexample is not None
    assert found.counterexample.reason.startswith("recovery fails: FileNotFoundError")


def test_ranks_of_which_only_one_is_waited_for_are_not_exchanged(tmp_path: Path) -> None:
    recording = record_shards(tmp_path / "root")

    def is_second_report(operation: Operation) -> bool:
        return operation.heard is not None and operation.heard[0] == 2

    assert symmetry_of(without(recording, is_second_report)).classes == ()


def test_ranks_that_write_one_file_are_not_exchanged(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "shared").write_bytes(b"")

    def save(rank: int) -> Callable[[Messages], object]:
        def run(_: Messages) -> None:
            write(root / f"own-{rank}", b"x")
            descriptor = os.open(root / "shared", os.O_WRONLY)
            os.pwrite(descriptor, b"%d" % rank, 0)
            os.close(descriptor)

        return run

    assert symmetry_of(record(root, [save(rank) for rank in range(2)])).classes == ()


def test_no_state_is_missed_that_recovery_comes_to_in_another_order() -> None:
    """Two ranks that each delete two objects by one request, and a recovery that begins at the
    last of them."""
    names = ["a0", "b0", "a1", "b1"]
    number = iter(range(9))

    def deletes(rank: int) -> list[Operation]:
        facts: dict[str, Any] = {"rank": rank, "request": rank}
        return [
            *(
                Operation(number=next(number), kind="delete", path=f"{name}{rank}", **facts)
                for name in "ab"
            ),
            Operation(number=next(number), kind="answer", **facts),
        ]

    recording = Recording(
        [deletes(0), deletes(1)],
        dict.fromkeys(names, b"x"),
        {name: node for node, name in enumerate(names, start=1)},
    )

    def seen(*, symmetric: bool) -> set[str]:
        found = set()

        def recover(objects: Objects) -> int:
            there = {name: name in objects.sizes(name) for name in reversed(names)}
            found.add(str(sorted((there[f"a{rank}"], there[f"b{rank}"]) for rank in range(2))))
            return 1

        explore_objects(recording, recover, old=1, new=1, symmetric=symmetric)
        return found

    assert symmetry_of(recording).classes == ((0, 1),)
    assert seen(symmetric=True) == seen(symmetric=False)
    assert len(seen(symmetric=False)) == 10


def test_ranks_of_this_projects_save_are_symmetric_but_for_the_coordinator(tmp_path: Path) -> None:
    assert symmetry_of(record_store(tmp_path / "store", ranks=4)).classes == ((1, 2, 3),)


def test_a_recovery_that_is_not_seen_is_still_refused(tmp_path: Path) -> None:
    recording = record_pointer(tmp_path / "pointer")
    with pytest.raises(ValueError, match="symmetric=True is for look='everything'"):
        explore(recording, lambda _: 2, old=1, new=2, model="weak", symmetric=True)
    with pytest.raises(ChaosError, match="not seen to look at anything"):
        explore(recording, lambda _: 2, old=1, new=2, model="weak")
