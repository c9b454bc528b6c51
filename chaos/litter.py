"""What a job leaves lying about on the machine: temporary files and shared-memory segments.

Each attempt has a ``TMPDIR`` of its own, so what is left there is the attempt's. ``/dev/shm`` is
everybody's: a segment is the attempt's if it appeared during it, no living process uses it, and
either a rank had it mapped when it left or torch named it after a process of the attempt.

Does not: see a segment with another name that no rank had mapped any more when it left.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def files_left(directory: Path) -> tuple[str, ...]:
    """Every file and directory directly below ``directory``."""
    return tuple(sorted(str(path) for path in directory.glob("*")))


def mapped_segments() -> list[str]:
    """The segments that this process has mapped, as paths."""
    prefix = f"{SHARED_MEMORY}/"
    return sorted({path for path in _mapped(Path("/proc/self")) if path.startswith(prefix)})


def segments() -> frozenset[tuple[Path, int]]:
    """The segments that there are now: path and inode."""
    found = set()
    for path in SHARED_MEMORY.glob("*"):
        with suppress(FileNotFoundError):
            found.add((path, path.lstat().st_ino))
    return frozenset(found)


def segments_left(
    before: Collection[tuple[Path, int]], *, pids: Iterable[int], mapped: Collection[str]
) -> list[Path]:
    """The segments of an attempt of which no process is left.

    Args:
        before: what `segments` found before the attempt.
        pids: of its processes.
        mapped: what its ranks had mapped when they left; see `mapped_segments`.
    """
    named = tuple(f"torch_{pid}_" for pid in pids)
    new = {
        path
        for path, _ in segments() - frozenset(before)
        if path.name.startswith(named) or str(path) in mapped
    }
    return sorted(new - _in_use()) if new else []


def _in_use() -> set[Path]:
    """Whatever a living process that may be looked into has mapped or open."""
    used: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            used.update(_mapped(process))
        with suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    used.add(os.readlink(descriptor))
    return {Path(path) for path in used}


def _mapped(process: Path) -> Iterator[str]:
    with (process / "maps").open(errors="replace") as lines:
        for line in lines:
            if "/" in line:
                yield line[line.index("/") :].rstrip("\n")
