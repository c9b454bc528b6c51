"""Decides what recovery makes of every state that a crash could leave, by running it.

Recovery runs in an empty directory. Whenever it looks at a name or reads a file, one of the things
that it may find there is decided, consistent with all that was decided before, and put there; the
others are tried in later runs. So every state is covered, while recovery runs once for each
sequence of things that it can find and not once for each state. With ``look="everything"`` all is
decided before recovery runs, for recoveries that look at files without Python's help.
`explore_objects` does the same in an object store.

Guarantees: exhaustive for a recovery that is deterministic, in one thread, and looks at files only
through `os` and `open`. Two invariants are judged: recovery returns the old or the new checkpoint;
and the new one once the save may have returned.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar

from seatrial.recovery.storage.objects import Objects

from ..errors import ChaosError
from .choices import Superfluous
from .directory_state import DirectoryState
from .disk import Assumptions, Disk, Model
from .object_model import ObjectModel
from .object_state import ObjectState
from .operations import Operation, Recording
from .symmetry import NONE, Symmetry, symmetry_of
from .watch import watching

__all__ = ["Counterexample", "Exploration", "explore", "explore_objects"]

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
        later: those of them that the operations after the crash would have made.
    """

    reason: str
    done: tuple[Operation, ...]
    found: dict[str, bytes | None]
    missing: tuple[str, ...]
    later: tuple[str, ...] = ()


@dataclass
class Exploration:
    """What was found under one model.

    Attributes:
        runs: how often recovery was run.
        states: for ``look="everything"``, how many states are covered by that; every way to decide
            every name and byte counts. Else None: what recovery does not look at is not decided.
        classes: the symmetric ranks that were exchanged freely, if that was asked for.
        outcomes: how many of the states that were tried returned what.
        complete: every state was covered. Once there is a counterexample, only a few more runs are
            made, to find a shorter one.
        counterexample: the shortest that was found.
    """

    model: Model
    runs: int = 0
    states: int | None = None
    classes: tuple[tuple[int, ...], ...] = ()
    complete: bool = True
    outcomes: dict[str, int] = field(default_factory=dict)
    counterexample: Counterexample | None = None

    def __str__(self) -> str:
        """How many states were covered, and how, in one line."""
        said = f"{self.model}: "
        if not self.complete:
            said += "not all states are covered; "
        elif self.states is None:
            said += "every state that recovery can tell apart is covered; "
        else:
            said += f"{self.states} states are covered; "
        said += f"recovery ran {self.runs} time{'' if self.runs == 1 else 's'}"
        for ranks in self.classes:
            said += f"; ranks {', '.join(map(str, ranks))} were exchanged"
        return said


def explore(
    recording: Recording,
    recover: Callable[[Path], object],
    *,
    old: object,
    new: object,
    model: Model,
    look: Literal["lazily", "everything"] = "lazily",
    symmetric: bool = False,
) -> Exploration:
    """Run ``recover(directory)`` for every state; it returns ``old`` or ``new``, or raises.

    Of several counterexamples the one with the fewest operations is kept.

    Args:
        symmetric: your word that recovery treats ranks alike. Of states that differ only in which
            of several symmetric ranks did what, one is tried; which ranks are symmetric is found
            out. With ``look="everything"``.

    Raises:
        ChaosError: recovery looked at nothing, or by means that Python does not see.
        ValueError: ``symmetric`` without ``look="everything"``.
    """
    if symmetric and look != "everything":
        raise ValueError("symmetric=True is for look='everything'")
    disk = Disk(recording, model)
    symmetry = symmetry_of(recording) if symmetric else NONE
    base = Path(tempfile.mkdtemp(prefix="seatrial-crash-", dir=_fast_directory()))
    root = base / "state"
    everything = look == "everything"

    def begin(choices: tuple[int, ...]) -> DirectoryState:
        if root.exists():
            shutil.rmtree(root)
        root.mkdir()
        return DirectoryState(disk, root, choices, symmetry)

    def run(state: DirectoryState) -> object:
        with watching(state.handle):
            return recover(root)

    try:
        return _search(_Search(disk, begin, run, everything, str(root)), symmetry, old, new)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def explore_objects(
    recording: Recording,
    recover: Callable[[Objects], object],
    *,
    old: object,
    new: object,
    symmetric: bool = False,
    late: bool = False,
) -> Exploration:
    """Run ``recover(objects)`` for every state of an object store; as `explore`.

    What recovery writes and deletes there it finds again.

    Args:
        symmetric: as in `explore`, and needs nothing else.
        late: requests that were in flight when the ranks died may also happen whenever recovery
            looks again at what they concern. For few ranks, and not with ``symmetric``.
    """
    if symmetric and late:
        raise ValueError("symmetric=True and late=True do not go together")
    disk = ObjectModel(recording)
    symmetry = symmetry_of(recording) if symmetric else NONE

    def begin(choices: tuple[int, ...]) -> ObjectState:
        return ObjectState(disk, choices, symmetry, late=late)

    return _search(_Search(disk, begin, recover, False, ""), symmetry, old, new)


class _State(Protocol):
    given: Assumptions
    alternatives: list[tuple[int, ...]]
    is_superfluous: bool

    def decide_everything(self) -> None: ...
    def visible(self) -> dict[str, bytes | None]: ...
    def missing(self) -> tuple[str, ...]: ...
    def stands_for(self) -> int: ...


_S = TypeVar("_S", bound=_State)


@dataclass(frozen=True)
class _Search(Generic[_S]):
    """What is searched: ``begin`` makes a state from choices, ``run`` runs recovery in it."""

    disk: Disk
    begin: Callable[[tuple[int, ...]], _S]
    run: Callable[[_S], object]
    everything: bool
    root: str

    def recovered(self, state: _S) -> tuple[object, str]:
        try:
            return self.run(state), ""
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # torch's CheckpointException is no Exception
            said = str(error).replace(self.root, "ROOT") if self.root else str(error)
            first = said.partition("\n")[0]
            return None, f"{type(error).__name__}: {first}"


def _search(search: _Search[_S], symmetry: Symmetry, old: object, new: object) -> Exploration:
    result = Exploration(search.disk.model, classes=symmetry.classes)
    result.states = 0 if search.everything else None
    known: dict[frozenset[tuple[str, bytes | None]], tuple[object, str]] = {}
    pending: list[tuple[int, ...]] = [()]
    runs_max = _RUNS_MAX
    while pending:
        if result.counterexample and result.runs >= runs_max:
            result.complete = False
            break
        if result.runs >= _RUNS_MAX:
            raise RuntimeError(f"more than {_RUNS_MAX} runs of recovery; save a smaller state")
        state = search.begin(pending.pop())
        if search.everything:
            try:
                state.decide_everything()
            except Superfluous:
                pending += state.alternatives
                continue
        key = frozenset(state.visible().items()) if search.everything else None
        if key is not None and key in known:
            returned, failure = known[key]
        else:
            returned, failure = search.recovered(state)
            result.runs += 1
        pending += state.alternatives
        if state.is_superfluous:
            continue
        if key is not None:
            known[key] = returned, failure
        if result.states is not None:
            result.states += state.stands_for()
        if not state.visible() and not state.missing():
            raise ChaosError("recovery was not seen to look at anything; look='everything'?")
        shown = failure or str(returned)
        result.outcomes[shown] = result.outcomes.get(shown, 0) + 1
        found = _broken(search.disk, state, returned, failure, old, new)
        if found is not None:
            if result.counterexample is None:
                runs_max = result.runs + _SHORTENING_RUNS
                result.counterexample = found
            elif len(found.done) < len(result.counterexample.done):
                result.counterexample = found
    return result


def _fast_directory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


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
    done = tuple(disk.recording.done(given.least))
    missing = state.missing()
    touched = {path for o in done for path in (o.path, o.target)}
    made = {c for change in disk.changes for c, node in change.names if node is not None}
    later = tuple(path for path in missing if path in made and path not in touched)
    return Counterexample(reason, done, state.visible(), missing, later)
