"""A state of a file system, put into a directory as recovery looks at it.

Whenever recovery looks at a name or reads a file, one of the things that it may find there is
decided and put there. `DirectoryState.decide_everything` does all of it at once.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from .choices import Choices
from .disk import Disk
from .symmetry import NONE, Symmetry
from .watch import Call, Files

__all__ = ["DirectoryState"]


class DirectoryState(Choices):
    """One state, in the empty directory ``root``."""

    def __init__(
        self, disk: Disk, root: Path, choices: tuple[int, ...], symmetry: Symmetry = NONE
    ) -> None:
        super().__init__(disk, symmetry, choices)
        self.root = root
        self._disk = disk
        own = symmetry.paths
        shared = set(disk.paths).difference(own)
        self._in_order = [path for path in disk.paths if path in shared] + own
        self._files = Files(str(root))
        self._nodes: dict[str, int | None] = {"": 0}
        self._bytes: dict[int, bytes] = {}
        self._places: dict[int, str] = {}
        self._thread = threading.local()

    def decide_everything(self) -> None:
        """Decide every name and every byte; raises `Superfluous`."""
        for path in self._in_order:
            self._look(path)
            self._read(path)
            self.pass_over(path)

    def visible(self) -> dict[str, bytes | None]:
        """What is decided to be there."""
        return {
            path: self._bytes.get(node, b"") if node in self._disk.files else None
            for path, node in self._nodes.items()
            if path and node is not None
        }

    def missing(self) -> tuple[str, ...]:
        """What is decided not to be there."""
        return tuple(path for path, node in self._nodes.items() if node is None)

    def _look(self, path: str) -> None:
        """Decide whether ``path`` is there, and put it there."""
        if path in self._nodes:
            return
        parent = os.path.dirname(path)
        self._look(parent)
        held = self._nodes.get(parent)
        if held is None or held in self._disk.files:
            return  # Not there for lack of a directory; if one appears later, it is recovery's own.
        node = self.choose(self._disk.names(path, self.given), path)
        assert node is None or isinstance(node, int)
        self._nodes[path] = node
        if node is None:
            return
        place = f"{self.root}{os.sep}{path}"
        if node not in self._disk.files:
            os.mkdir(place)
        elif node in self._places:
            os.link(self._places[node], place)
        else:
            _write(place, b"")
            self._places[node] = place

    def _read(self, path: str) -> None:
        """Decide what the file at ``path`` holds, and write it."""
        node = self._nodes.get(path)
        if node is None or node not in self._disk.files or node in self._bytes:
            return
        content = self.choose(self._disk.contents(node, self.given), path)
        assert isinstance(content, bytes)
        self._bytes[node] = content
        if content:
            _write(f"{self.root}{os.sep}{path}", content)

    def handle(self, name: str, call: Call, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if getattr(self._thread, "inside", False):
            return call(*args, **options)
        self._thread.inside = True
        try:
            self._prepare(name, args, options)
        finally:
            self._thread.inside = False
        result = call(*args, **options)
        if name == "open":
            path = self._files.relative(args[0], options.get("dir_fd"))
            if path is not None:
                self._files.opened[result] = path
        return result

    def _prepare(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if name in ("close", "write", "pwrite", "fsync", "fdatasync", "ftruncate"):
            if name == "close":
                self._files.opened.pop(args[0], None)
            return
        directory = options.get("dir_fd", options.get("src_dir_fd"))
        first = args[0] if args else options.get("path", options.get("src", "."))
        path = self._files.relative(first, directory)
        if path is not None:
            self._look(path)
            if name in ("listdir", "scandir"):
                for below in self._disk.below(path):
                    self._look(below)
            elif name != "lstat":
                self._read(path)
        if name in ("rename", "replace", "link"):
            target = self._files.relative(args[1], options.get("dst_dir_fd"))
            if target is not None:
                self._look(target)
            for below in self._disk.paths:
                if path and below.startswith(f"{path}{os.sep}"):
                    self._look(below)
                    self._read(below)


def _write(place: str, content: bytes) -> None:
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT, 0o644)  # there are very many of them
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)
