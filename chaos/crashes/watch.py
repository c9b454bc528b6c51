"""Sees what this process does to the files below one directory, through `os` and `open`.

Python's functions are replaced while `watching` is entered. What native code does is not seen; the
recorder finds that out by comparing what it saw with what is there.
"""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Files", "watching"]

_PATH = (
    "open", "stat", "lstat", "listdir", "scandir", "mkdir", "rmdir", "unlink", "remove", "truncate",
)  # fmt: skip
_TWO_PATHS = ("rename", "replace", "link")
_DESCRIPTOR = ("close", "write", "pwrite", "fsync", "fdatasync", "ftruncate")


class Files:
    """Names of descriptors, and paths relative to ``root``."""

    def __init__(self, root: str) -> None:
        self.root = os.path.realpath(root)
        self.opened: dict[int, str] = {}

    def relative(self, path: Any, directory: int | None = None) -> str | None:
        """``path`` below the root, "" for the root itself, None elsewhere."""
        if isinstance(path, int):
            return self.opened.get(path)
        text = os.fsdecode(os.fspath(path))
        if directory is not None and not os.path.isabs(text):
            held = self.opened.get(directory)
            if held is None:
                return None
            joined = os.path.normpath(os.path.join(held, text))
            return "" if joined == "." else joined
        text = os.path.abspath(text)
        if text == self.root:
            return ""
        prefix = f"{self.root}{os.sep}"
        return text.removeprefix(prefix) if text.startswith(prefix) else None


Call = Callable[..., Any]
Handler = Callable[[str, Call, tuple[Any, ...], dict[str, Any]], Any]
"""Called with the function's name, the function, and its arguments; calls it and returns."""


@contextmanager
def watching(handler: Handler) -> Iterator[None]:
    """Send every call of a function that works on files to ``handler``."""
    names = (*_PATH, *_TWO_PATHS, *_DESCRIPTOR)
    real = {name: getattr(os, name) for name in names}
    real_open = builtins.open

    def replacement(name: str) -> Call:
        function = real[name]

        def call(*args: Any, **options: Any) -> Any:
            return handler(name, function, args, options)

        return call

    def open_file(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        return handler("open_file", real_open, (file, mode, *args), options)

    for name in names:
        setattr(os, name, replacement(name))
    builtins.open = io.open = open_file
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)
        builtins.open = io.open = real_open
