"""Where the threads of a hung rank are below Python: their native stacks, or what the kernel tells.

Guarantees: asks from outside, so a rank that is stopped or holds a lock answers as well; nothing in
it is changed, but that it is paused for a moment. With ``pystack`` installed (the extra ``stacks``)
native and Python frames of all threads; without, or where it fails, where in the kernel each thread
waits. What could not be had, and why, is one of the lines. Torch-free.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_PATIENCE_S = 30.0
_FRAMES = 16


def native_stacks(processes: Mapping[int, int], directory: Path) -> tuple[str, ...]:
    """Lines on each rank, the main thread's newest frames first; ``processes`` are ids by rank.

    All threads in full are written to ``directory``, as ``rank<R>.native``.
    """
    has_pystack = importlib.util.find_spec("pystack") is not None
    with ThreadPoolExecutor() as pool:
        if has_pystack:
            found = list(pool.map(_by_pystack, processes.values()))
        else:
            why = "pystack is not installed (pip install 'seatrial[stacks]')"
            found = [("", why)] * len(processes)
    lines: list[str] = []
    for (rank, process), (text, why) in zip(processes.items(), found, strict=True):
        if text:
            (directory / f"rank{rank}.native").write_text(text)
            lines += [f"rank {rank}, native, newest frame first:", *_newest_of_main(text, process)]
        else:
            lines.append(f"rank {rank}, no native stack: {why}")
            lines += _by_kernel(process)
    return tuple(lines)


def _by_pystack(process: int) -> tuple[str, str]:
    """What pystack prints, or why it does not."""
    command = [sys.executable, "-P", "-m", "pystack", "remote", "--no-color", "--native-all"]
    try:
        done = subprocess.run(
            [*command, str(process)],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"pystack took more than {_PATIENCE_S:.0f} s"
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        return "", f"pystack: {said[-1] if said else f'status {done.returncode}'}"
    return done.stdout, ""


def _newest_of_main(text: str, process: int) -> list[str]:
    threads = [each for each in text.split("Traceback for thread ") if each.strip()]
    main = next((each for each in threads if each.startswith(f"{process} ")), "")
    frames = [_frame(line) for line in main.splitlines()[1:] if line.startswith("    (")]
    newest = [f"    {frame}" for frame in reversed(frames[-_FRAMES:])]
    more = len(frames) - len(newest)
    return newest + [f"    … and {more} more"] * (more > 0)


_NATIVE = re.compile(r"\(C\) File .*?, line \d+, in (?P<name>.*) \((?P<library>[^()]*)\)$")
_WIDTH_MAX = 160


def _frame(line: str) -> str:
    """A frame on one line: of C++ the function and the library, of Python what pystack prints."""
    found = _NATIVE.search(line)
    if found is None:
        return line.strip()[:_WIDTH_MAX]
    name = _without_arguments(found["name"].removesuffix(" (inlined)"))
    return f"{name} ({Path(found['library']).name})"[:_WIDTH_MAX]


def _without_arguments(name: str) -> str:
    """The name of a C++ function, whose arguments tell little and take lines."""
    name = name.removesuffix(" const")
    depth = 0
    for position in range(len(name) - 1, 0, -1):
        depth += {")": 1, "(": -1}.get(name[position], 0)
        if not depth:
            return name[:position] if name[position] == "(" else name
    return name


def _by_kernel(process: int) -> list[str]:
    """For each thread where in the kernel it is, the main thread first."""
    lines = []
    for task in sorted(_threads(process), key=lambda each: int(each.name)):
        state = _read(task / "stat").rpartition(")")[2].split()[:1]
        stack = [line.split()[-1] for line in _read(task / "stack").splitlines()]
        where = " < ".join(frame.partition("+")[0] for frame in stack[:4])
        where = where or _read(task / "wchan").strip("0\n") or "unknown"
        name = _read(task / "comm").strip()
        lines.append(f"    thread {task.name} ({name}) {''.join(state)}, in the kernel: {where}")
    return lines or ["    the process is gone"]


def _threads(process: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{process}/task").iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # gone meanwhile, or not ours to read
