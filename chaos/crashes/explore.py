"""Decides what recovery makes of every state that a crash could leave, by running it.

Recovery runs in an empty directory. Whenever it looks at a name or reads a file, one of the things
that it may find there is decided, consistent with all that was decided before, and put there; the
others are tried in later runs. So every state is covered, while recovery runs once for each
sequence of things that it can find and not once for each state. With ``look="everything"`` all is
decided before recovery runs, for recoveries that look at files without Python's help.

Guarantees: exhaustive for a recovery that is deterministic, in one thread, and looks at files only
through `os` and `open`. Two invariants are judged: recovery returns the old or the new checkpoint;
and the new one once the save may have returned.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import ChaosError
from .disk import Assumptions, Disk, Model, Option
from .operations import Operation, Recording
from .watch import Call, Files, watching

__all__ = ["Counterexample", "Exploration", "explore"]

Recover = Callable[[Path], object]
_RUNS_MAX = 200_000
_SHORTENING_RUNS = 100


@dataclass(frozen=True)
class Counterexample:
    """A state in which an invariant is broken.

    Attributes:
        reason: which one, and what recovery did.
        done: the operations before the crash, in their order; the fewest that lead to it.
        found: what recovery found in the directory: path to bytes, None for a directory.
        missing: names that recovery looked for and that were not there.
    """

    reason: str
    done: tuple[Operation, ...]
    found: dict[str, bytes | None]
    missing: tuple[str, ...]


@dataclass
class Exploration:
    """What was found under one model.

    Attributes:
        runs: how often recovery was run.
        outcomes: how many of these runs returned what.
        complete: every state was covered. Once there is a counterexample, only a few more runs are
            made, to find a shorter one.
        counterexample: the shortest that was found.
    """

    model: Model
    runs: int = 0
    complete: bool = True
    outcomes: dict[str, int] = field(default_factory=dict)
    counterexample: Counterexample | None = None


def explore(
    recording: Recording,
    recover: Recover,
    *,
    old: object,
    new: object,
    model: Model,
    look: Literal["lazily", "everything"] = "lazily",
) -> Exploration:
    """Run ``recover(directory)`` for every state; it returns ``old`` or ``new``, or raises.

    Of several counterexamples the one with the fewest operations is kept.

    Raises:
        ChaosError: recovery looked at nothing, or by means that Python does not see.
    """
    disk = Disk(recording, model)
    result = Exploration(model)
    known: dict[frozenset[tuple[str, bytes | None]], tuple[object, str]] = {}
    pending: list[tuple[int, ...]] = [()]
    base = Path(tempfile.mkdtemp(prefix="seatrial-crash-", dir=_fast_directory()))
    try:
        runs_max = _RUNS_MAX
        while pending:
            if result.counterexample and result.runs >= runs_max:
                result.complete = False
                break
            if result.runs >= _RUNS_MAX:
                raise RuntimeError(f"more than {_RUNS_MAX} runs of recovery; save a smaller state")
            root = base / "state"
            root.mkdir()
            state = _State(disk, root, pending.pop())
            if look == "everything":
                state.decide_everything()
            key = frozenset(state.visible().items()) if look == "everything" else None
            if key is not None and key in known:
                returned, failure = known[key]
            else:
                returned, failure = _recovered(recover, state)
                result.runs += 1
            if key is not None:
                known[key] = returned, failure
            if not state.visible() and not state.missing():
                raise ChaosError("recovery was not seen to look at anything; look='everything'?")
            pending += state.alternatives
            shown = failure or str(returned)
            result.outcomes[shown] = result.outcomes.get(shown, 0) + 1
            found = _broken(disk, state, returned, failure, old, new)
            if found is not None:
                if result.counterexample is None:
                    runs_max = result.runs + _SHORTENING_RUNS
                    result.counterexample = found
                elif len(found.done) < len(result.counterexample.done):
                    result.counterexample = found
            shutil.rmtree(root)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return result


def _fast_directory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _recovered(recover: Recover, state: _State) -> tuple[object, str]:
    try:
        with watching(state.handle):
            return recover(state.root), ""
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        said = str(error).replace(str(state.root), "ROOT").partition("\n")[0]
        return None, f"{type(error).__name__}: {said}"


def _broken(
    disk: Disk, state: _State, returned: object, failure: str, old: object, new: object
) -> Counterexample | None:
    given = state.given
    if failure:
        reason = f"recovery fails: {failure}"
    elif returned not in (old, new):
        reason = f"recovery returns {returned}, which is neither the old nor the new checkpoint"
    elif returned != new and (acknowledged := disk.acknowledged(given)) is not None:
        given = acknowledged
        reason = f"the save had returned, and recovery returns {returned} instead of {new}"
    else:
        return None
    return state.counterexample(reason, given)


class _State:
    """One state, of which more and more is decided."""

    def __init__(self, disk: Disk, root: Path, choices: tuple[int, ...]) -> None:
        self.root = root
        self.given = disk.anything
        self.alternatives: list[tuple[int, ...]] = []
        self._disk = disk
        self._choices = choices
        self._taken: list[int] = []
        self._files = Files(str(root))
        self._nodes: dict[str, int | None] = {"": 0}
        self._bytes: dict[int, bytes] = {}
        self._places: dict[int, str] = {}
        self._thread = threading.local()

    def decide_everything(self) -> None:
        for path in self._disk.paths:
            self._look(path)
            self._read(path)

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

    def counterexample(self, reason: str, given: Assumptions) -> Counterexample:
        done = tuple(self._disk.recording.done(given.least))
        return Counterexample(reason, done, self.visible(), self.missing())

    def _choose(self, options: list[Option]) -> object:
        choice = 0
        if len(options) > 1:
            depth = len(self._taken)
            if depth < len(self._choices):
                choice = self._choices[depth]
            else:
                taken = tuple(self._taken)
                self.alternatives += [(*taken, other) for other in range(1, len(options))]
            self._taken.append(choice)
        self.given = options[choice].assumptions
        return options[choice].found

    def _look(self, path: str) -> None:
        """Decide whether ``path`` is there, and put it there."""
        if path in self._nodes:
            return
        parent = os.path.dirname(path)
        self._look(parent)
        if self._nodes.get(parent) is None or parent in self._file_paths():
            return  # Not there for lack of a directory; if one appears later, it is recovery's own.
        node = self._choose(self._disk.names(path, self.given))
        assert node is None or isinstance(node, int)
        self._nodes[path] = node
        if node is None:
            return
        place = self.root / path
        if node not in self._disk.files:
            place.mkdir()
        elif node in self._places:
            os.link(self.root / self._places[node], place)
        else:
            place.write_bytes(b"")
            self._places[node] = path

    def _file_paths(self) -> set[str]:
        return {path for path, node in self._nodes.items() if node in self._disk.files}

    def _read(self, path: str) -> None:
        """Decide what the file at ``path`` holds, and write it."""
        node = self._nodes.get(path)
        if node is None or node not in self._disk.files or node in self._bytes:
            return
        content = self._choose(self._disk.contents(node, self.given))
        assert isinstance(content, bytes)
        self._bytes[node] = content
        if content:
            (self.root / path).write_bytes(content)

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
