"""A directory seen as objects, so that one suite asks all backends the same questions.

The operations are those that the store uses there: a whole file appears by a rename, or exclusively
by a link (`seatrial.recovery.publish`). Torch-free; used by `seatrial.chaos.certify.suite`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from seatrial.recovery.errors import AlreadyPublishedError
from seatrial.recovery.publish import fsync_directory, probe_publish, publish_once

__all__ = ["DirectoryObjects"]


@dataclass(frozen=True)
class DirectoryObjects:
    """The files below ``root``, by names with slashes."""

    root: Path

    @property
    def url(self) -> str:
        return str(self.root)

    def prove(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        probe_publish(self.root)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        found = {}
        for directory, _, names in os.walk(self.root):
            for name in names:
                path = Path(directory, name)
                relative = str(path.relative_to(self.root))
                if relative.startswith(prefix):
                    with suppress(FileNotFoundError):
                        found[relative] = path.stat().st_size
        return found

    def get(self, name: str, bytes_max: int) -> bytes:
        with self._path(name).open("rb") as file:
            return file.read(bytes_max)

    def put(self, name: str, data: bytes) -> None:
        path = self._made(name)
        temporary = path.with_name(f".{path.name}.{token_hex(8)}.tmp")
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        fsync_directory(path.parent)

    def create(self, name: str, data: bytes) -> bool:
        try:
            publish_once(self._made(name), data)
        except AlreadyPublishedError:
            return False
        return True

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            path = self._path(name)
            path.unlink(missing_ok=True)
            with suppress(OSError):
                while path.parent != self.root:
                    path = path.parent
                    path.rmdir()  # until one is not empty

    def _path(self, name: str) -> Path:
        return self.root / name

    def _made(self, name: str) -> Path:
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path
