"""Where the stores of trials are: directories, or prefixes below a URL.

Guarantees: what was put below a location is gone after `remove`, unfinished
uploads included; nothing beside it is touched.

Does not: remove anything below a URL when pytest itself is killed; nobody is left then who would.
Torch-free; called by the session, and by damage in a rank.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from seatrial.recovery.publish import fsync_directory
from seatrial.recovery.storage import is_url, open_storage
from seatrial.recovery.storage.objects import Objects, ObjectStorage

__all__ = ["below", "copy_step", "keep", "make", "objects_at", "remove"]


def below(base: str, *names: str) -> str:
    """The location ``names`` below ``base``."""
    return "/".join((base.rstrip("/"), *names)) if is_url(base) else str(Path(base, *names))


def objects_at(location: str) -> Objects | None:
    """The objects below a URL; None for a directory."""
    storage = open_storage(location)
    return storage.objects if isinstance(storage, ObjectStorage) else None


def make(location: str) -> None:
    """Make an empty store, durably; an object store needs nothing made."""
    if objects_at(location) is None:
        path = Path(location)
        path.mkdir(parents=True)
        # It was there long before the job, so a power loss must not take it.
        for directory in (path, *path.parents):
            fsync_directory(directory)


def remove(location: str) -> None:
    """Remove a store and everything in it."""
    objects = objects_at(location)
    if objects is None:
        shutil.rmtree(location, ignore_errors=True)
        return
    for upload in objects.uploads():
        objects.abort(*upload)
    objects.delete(list(objects.sizes()))


def copy_step(source: Path, location: str) -> None:
    """Put the step in the directory ``source`` into the store at ``location``."""
    objects = objects_at(location)
    if objects is None:
        shutil.copytree(source, Path(location) / source.name)
        return
    # The manifest last: it must not name what is not there yet.
    files = [path for path in source.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: path.parent == source):
        objects.put(str(path.relative_to(source.parent)), path.read_bytes())


def keep(location: str, directory: Path) -> None:
    """Copy a store into a directory."""
    objects = objects_at(location)
    if objects is None:
        shutil.copytree(location, directory, dirs_exist_ok=True)
        return
    for name, size_bytes in objects.sizes().items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(objects.get(name, size_bytes))
