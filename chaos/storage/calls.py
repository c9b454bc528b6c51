"""The calls of a file system of fsspec that are one operation each, and what they move where.

Torch-free; used by `seatrial.chaos.storage.filesystem`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["EVENTS", "OVERWRITING", "Call"]

EVENTS = {
    "cat_file": "storage/read",
    "get_file": "storage/read",
    "pipe_file": "storage/write",
    "put_file": "storage/write",
    "cp_file": "storage/write",
    "rm_file": "storage/delete",
    "rmdir": "storage/delete",
    "info": "storage/stat",
    "exists": "storage/stat",
    "ls": "storage/list",
    "mkdir": "storage/create",
    "makedirs": "storage/create",
    "mv": "storage/rename",
}
_SECOND_IS_TARGET = ("put_file", "cp_file", "mv")
OVERWRITING = ("pipe_file", "put_file", "cp_file", "mv")


class Call:
    """One call of a method of the table: on which file, with which bytes."""

    def __init__(
        self,
        stripped: Callable[[str], str],
        name: str,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        first, *rest = arguments
        self.event = EVENTS[name]
        if name == "put_file":
            self._arguments = [first, stripped(rest[0]), *rest[1:]]
        elif name in _SECOND_IS_TARGET:
            self._arguments = [stripped(first), stripped(rest[0]), *rest[1:]]
        else:
            self._arguments = [stripped(first), *rest]
        self.file = str(self._arguments[1 if name in _SECOND_IS_TARGET else 0])
        self.is_overwriting = name in OVERWRITING
        self.data: Any = None
        self.facts: dict[str, object] = {}
        if name == "pipe_file":
            self.data = options.pop("value") if "value" in options else rest[0]
            self._arguments = [self.file, self.data, *rest[1:]]
            if "create" in (options.get("mode"), *rest[1:]):
                self.event = "storage/publish"
        elif name == "cat_file":
            start = options.get("start", rest[0] if rest else None)
            self.facts["offset"] = start or 0

    def with_data(self, data: Any) -> list[Any]:
        """The arguments, with ``data`` in place of the bytes to write."""
        if self.data is None:
            return self._arguments
        return [self.file, data, *self._arguments[2:]]
