"""Verifies what a simulated power loss leaves, without a file system: durable, lost or torn."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial.chaos.powerloss.volatile import SURVIVES, Survives, Volatile


class Program:
    """Changes files below a directory, and tells as a file system would."""

    def __init__(self, root: Path) -> None:
        self.root = root / "live"
        self.root.mkdir()
        self.volatile = Volatile(self.root, root / "scratch")

    def write(self, path: str, content: bytes) -> Program:
        is_new = not (self.root / path).exists()
        (self.root / path).write_bytes(content)
        if is_new:
            self.volatile.made(path)
        self.volatile.wrote((self.root / path).stat().st_ino)
        return self

    def truncate(self, path: str, length: int) -> Program:
        os.truncate(self.root / path, length)
        self.volatile.truncated((self.root / path).stat().st_ino, length)
        return self

    def mkdir(self, path: str) -> Program:
        (self.root / path).mkdir()
        self.volatile.made(path)
        return self

    def fsync(self, path: str) -> Program:
        if (self.root / path).is_dir():
            self.volatile.synced_directory(path)
            return self
        descriptor = os.open(self.root / path, os.O_RDONLY)
        try:
            self.volatile.synced_file(descriptor)
        finally:
            os.close(descriptor)
        return self

    def rename(self, old: str, new: str) -> Program:
        target = self.root / new
        replaced = target.stat().st_ino if target.exists() else -1
        (self.root / old).rename(target)
        self.volatile.removed(replaced)
        return self

    def unlink(self, path: str) -> Program:
        inode = (self.root / path).stat().st_ino
        (self.root / path).unlink()
        self.volatile.removed(inode)
        return self

    def found(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.root)): path.read_bytes()
            for path in self.root.rglob("*")
            if path.is_file()
        }


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


OLD = b"old old "
NEW = b"new new new "
DURABLE = {"a": OLD}


def replaced(program: Program) -> Program:
    """A durable file ``a``, and a newer one with its name, of which nothing is durable."""
    program.write("a", OLD).fsync("a").fsync("")
    return program.write("a.new", NEW).rename("a.new", "a")


Situation = Callable[[Program], Program]

SITUATIONS: list[tuple[str, Situation, dict[Survives, dict[str, bytes]]]] = [
    (
        "a new file, nothing synced",
        lambda p: p.write("a", NEW),
        {"certain": {}, "names": {"a": b""}, "half": {"a": NEW[:6]}, "all": {"a": NEW}},
    ),
    (
        "the file synced, not its directory",
        lambda p: p.write("a", NEW).fsync("a"),
        {"certain": {}, "names": {"a": NEW}, "half": {"a": NEW}, "all": {"a": NEW}},
    ),
    (
        "the directory synced, not the file",
        lambda p: p.write("a", NEW).fsync(""),
        {"certain": {"a": b""}, "names": {"a": b""}, "half": {"a": NEW[:6]}, "all": {"a": NEW}},
    ),
    (
        "both synced",
        lambda p: p.write("a", NEW).fsync("a").fsync(""),
        {each: {"a": NEW} for each in SURVIVES},
    ),
    (
        "written again after the sync",
        lambda p: p.write("a", OLD).fsync("a").fsync("").write("a", NEW),
        {"certain": DURABLE, "names": DURABLE, "half": {"a": NEW[:6] + OLD[6:]}, "all": {"a": NEW}},
    ),
    (
        "given a length",
        lambda p: p.write("a", OLD).fsync("a").fsync("").truncate("a", 12),
        {
            "certain": DURABLE,
            **{each: {"a": OLD + bytes(4)} for each in SURVIVES[1:]},
        },
    ),
    (
        "cut off",
        lambda p: p.write("a", OLD).fsync("a").fsync("").truncate("a", 2),
        {"certain": DURABLE, **{each: {"a": OLD[:2]} for each in SURVIVES[1:]}},
    ),
    (
        "replaced, nothing synced",
        replaced,
        {"certain": DURABLE, "names": {"a": b""}, "half": {"a": NEW[:6]}, "all": {"a": NEW}},
    ),
    (
        "replaced, the new one synced first",
        lambda p: replaced(p).fsync("a"),
        {"certain": DURABLE, "names": {"a": NEW}, "half": {"a": NEW}, "all": {"a": NEW}},
    ),
    (
        "replaced and all synced",
        lambda p: replaced(p).fsync("a").fsync(""),
        {each: {"a": NEW} for each in SURVIVES},
    ),
    (
        "removed, not synced",
        lambda p: p.write("a", OLD).fsync("a").fsync("").unlink("a"),
        {"certain": DURABLE, "names": {}, "half": {}, "all": {}},
    ),
    (
        "removed, and another file in its place",
        lambda p: p.write("a", OLD).fsync("a").fsync("").unlink("a").write("b", NEW).fsync("b"),
        {"certain": DURABLE, "names": {"b": NEW}, "half": {"b": NEW}, "all": {"b": NEW}},
    ),
    (
        "in a directory whose own name is not durable",
        lambda p: p.mkdir("d").write("d/a", NEW).fsync("d/a").fsync("d"),
        {"certain": {}, **{each: {"d/a": NEW} for each in SURVIVES[1:]}},
    ),
    (
        "in a directory whose name is durable",
        lambda p: p.mkdir("d").fsync("").write("d/a", NEW).fsync("d/a").fsync("d"),
        {each: {"d/a": NEW} for each in SURVIVES},
    ),
    (
        "moved to another directory, of which only the new one is synced",
        lambda p: p.mkdir("d").write("a", OLD).fsync("a").fsync("").rename("a", "d/a").fsync("d"),
        {"certain": {"a": OLD, "d/a": OLD}, **{each: {"d/a": OLD} for each in SURVIVES[1:]}},
    ),
]


@pytest.mark.parametrize("survives", SURVIVES)
@pytest.mark.parametrize(("name", "situation", "left"), SITUATIONS, ids=[s[0] for s in SITUATIONS])
def test_what_is_left(
    program: Program,
    survives: Survives,
    name: str,
    situation: Situation,
    left: dict[Survives, dict[str, bytes]],
) -> None:
    situation(program)
    program.volatile.cut(survives)
    assert program.found() == left[survives]


@pytest.mark.parametrize("survives", SURVIVES)
def test_what_is_left_is_durable_from_then_on(program: Program, survives: Survives) -> None:
    program.write("a", NEW)
    program.volatile.cut(survives)
    left = program.found()
    assert program.volatile.cut("certain") == []
    assert program.found() == left


def test_what_was_there_at_first_is_durable(tmp_path: Path) -> None:
    (tmp_path / "live" / "d").mkdir(parents=True)
    (tmp_path / "live" / "d" / "a").write_bytes(OLD)
    volatile = Volatile(tmp_path / "live", tmp_path / "scratch")
    assert volatile.cut("certain") == []
    assert (tmp_path / "live" / "d" / "a").read_bytes() == OLD


def test_what_was_lost_is_said_once_for_a_directory(program: Program) -> None:
    program.mkdir("kept").write("kept/a", OLD).fsync("").fsync("kept")
    program.mkdir("d").write("d/a", NEW).write("d/b", NEW)
    assert program.volatile.cut("certain") == ["d is gone", "kept/a has 0 of 8 bytes"]
