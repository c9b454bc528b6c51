"""A directory of which only what was fsynced is certain to survive.

Guarantees, with ``survives`` as `Survives` says: the bytes of a file are certain as they were at
its last fsync; a name, its absence included, is certain as it was at the last fsync of its
directory, and only if that directory's own name is. That is what POSIX promises; ext4 and XFS keep
more (the name of a new file that was fsynced, for one).

`Volatile` is told of every change after it was made below ``live``; it makes none itself before
`Volatile.cut`. One thread.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from itertools import count
from pathlib import Path
from typing import Literal, get_args

Survives = Literal["certain", "names", "half", "all"]
"""``certain``: only what was fsynced. ``names``: every change of names too, and every length that
was set by truncating, with zeros for the bytes, as ext4 and XFS have it once their journal is
written. ``half``: also the first half of each file that was not fsynced. ``all``: everything."""

SURVIVES: tuple[Survives, ...] = get_args(Survives)


class Volatile:
    """The durable image of the directory ``live``, kept in ``scratch``, on the same file system.

    Whatever is in ``live`` at first is taken to be durable.
    """

    def __init__(self, live: Path, scratch: Path) -> None:
        self.live = live
        self._scratch = scratch
        self._forget()

    def made(self, path: str) -> None:
        """A new file or directory has the name ``path``, relative to ``live``."""
        node = self._nodes[_inode(self.live / path)] = next(self._numbers)
        if (self.live / path).is_dir():
            self._entries[node] = {}

    def removed(self, inode: int) -> None:
        """The last name of a file or directory is gone; its number may be given out again."""
        self._nodes.pop(inode, None)

    def wrote(self, inode: int) -> None:
        """The bytes or the length of the file changed."""
        if inode in self._nodes:  # a file without a name is lost anyway
            self._dirty.add(self._nodes[inode])

    def truncated(self, inode: int, length: int) -> None:
        """The file was given a length, in bytes."""
        self.wrote(inode)
        if inode in self._nodes:
            self._lengths[self._nodes[inode]] = length

    def synced_file(self, descriptor: int) -> None:
        """The file's bytes are durable now."""
        node = self._nodes.get(os.fstat(descriptor).st_ino)
        if node is not None:
            # Opened anew: the descriptor may be for writing alone, and the file without a name.
            shutil.copyfile(f"/proc/self/fd/{descriptor}", self._content(node))
            self._dirty.discard(node)
            self._lengths.pop(node, None)

    def synced_directory(self, path: str) -> None:
        """The names in the directory are durable now."""
        where = self.live / path
        self._entries[self._node(path)] = {
            name: self._node(os.path.join(path, name)) for name in os.listdir(where)
        }

    def cut(self, survives: Survives) -> list[str]:
        """Make ``live`` what is there when power returns; everything in it is durable then.

        Returns:
            What was lost: a sentence for each name and each file that is another now.
        """
        after = self._scratch / "after"
        after.mkdir()
        if survives == "certain":
            self._build_certain(self._node(""), after)
        else:
            self._build_live("", after, survives)
        lost = differences(listing(self.live), listing(after))
        before = self._scratch / "before"
        self.live.rename(before)
        after.rename(self.live)
        shutil.rmtree(before)
        self._forget()
        return lost

    def _build_certain(self, node: int, target: Path) -> None:
        for name, child in self._entries[node].items():
            if child in self._entries:
                (target / name).mkdir()
                self._build_certain(child, target / name)
            else:
                (target / name).write_bytes(self._durable(child))

    def _build_live(self, path: str, target: Path, survives: Survives) -> None:
        for entry in os.scandir(self.live / path):
            inner = os.path.join(path, entry.name)
            if entry.is_dir(follow_symlinks=False):
                (target / entry.name).mkdir()
                self._build_live(inner, target / entry.name, survives)
                continue
            node = self._node(inner)
            content = Path(entry.path).read_bytes()
            if node in self._dirty and survives != "all":
                kept = len(content) // 2 if survives == "half" else 0
                content = content[:kept] + self._durable(node)[kept:]
                length = self._lengths.get(node, len(content))
                content = content[:length].ljust(length, b"\0")
            (target / entry.name).write_bytes(content)

    def _forget(self) -> None:
        """Take what is below ``live`` for durable."""
        self._numbers = count()
        self._nodes: dict[int, int] = {}  # by inode; an inode is given out again, a node is not
        self._dirty: set[int] = set()
        self._lengths: dict[int, int] = {}  # set by truncating, since the last sync
        self._entries: dict[int, dict[str, int]] = {}  # of each directory, what is certain
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir(parents=True)
        self.made("")
        directories = [""]
        for where in directories:
            for entry in os.scandir(self.live / where):
                path = os.path.join(where, entry.name)
                self.made(path)
                if entry.is_dir(follow_symlinks=False):
                    directories.append(path)
                else:
                    shutil.copyfile(entry.path, self._content(self._node(path)))
        for where in directories:
            self.synced_directory(where)

    def _node(self, path: str) -> int:
        return self._nodes[_inode(self.live / path)]

    def _content(self, node: int) -> Path:
        return self._scratch / str(node)

    def _durable(self, node: int) -> bytes:
        content = self._content(node)
        return content.read_bytes() if content.exists() else b""


class Steady(Volatile):
    """A directory that keeps its power: nothing is remembered of it, and nothing is lost."""

    def __init__(self) -> None:
        pass

    def made(self, path: str) -> None: ...

    def removed(self, inode: int) -> None: ...

    def wrote(self, inode: int) -> None: ...

    def truncated(self, inode: int, length: int) -> None: ...

    def synced_file(self, descriptor: int) -> None: ...

    def synced_directory(self, path: str) -> None: ...

    def cut(self, survives: Survives) -> list[str]:
        return []


Listing = dict[str, tuple[int, bytes]]
"""Of every path below a directory the size in bytes and a digest; of a directory ``(-1, b"")``."""


def listing(directory: Path) -> Listing:
    """What there is below ``directory``."""
    found: Listing = {}
    for where, directories, files in os.walk(directory):
        for name in directories:
            found[os.path.relpath(os.path.join(where, name), directory)] = (-1, b"")
        for name in files:
            path = os.path.join(where, name)
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, hashlib.blake2b).digest()
            found[os.path.relpath(path, directory)] = (os.lstat(path).st_size, digest)
    return found


def differences(before: Listing, after: Listing) -> list[str]:
    """What a power loss did, in words, by path."""
    said = []
    for path in sorted({*before, *after}):
        above = os.path.dirname(path)
        # Of a directory that is gone or back, what is in it goes without saying.
        if path not in after and (not above or above in after):
            said.append(f"{path} is gone")
        elif path not in before and (not above or above in before):
            said.append(f"{path} is back")
        elif path in before and path in after and before[path] != after[path]:
            had, has = before[path][0], after[path][0]
            what = "other bytes" if had == has else f"{has} of {had} bytes"
            said.append(f"{path} has {what}")
    return said


def _inode(path: Path) -> int:
    return os.lstat(path).st_ino
