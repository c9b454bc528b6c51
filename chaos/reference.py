"""The reference of an experiment: the same job, never interrupted, run twice and found equal.

Guarantees: computed once for all processes that share a directory (a file lock, which the kernel
drops with its holder); a failure is remembered too, so that each process says the same. Torch-free.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from .diagnosis import NONDETERMINISM_CAUSES
from .errors import NondeterministicJobError, ReferenceFailedError
from .experiment import Experiment
from .run import Run, load_run
from .schedule import Schedule
from .trajectory import Trajectory, read_trajectory
from .verdict import Verdict, judge

_FIRST_SILENCE_S = 60.0
_SILENCE_S_MIN = 30.0  # a busy disk holds an fsync for seconds, and that is no hang
_STOPPED_S_MIN = 3.0
_FACTOR = 20.0
_LEAVING_FACTOR = 3.0
_STILL_S_MIN = 1.0
_STILL_FACTOR = 5.0

_SAID_TO_USERS = {"UsageError", "TopologyError", "StateError", "DamagedRecordError"}
"""Errors whose message is a sentence for the user: a traceback would only hide it."""

RunClean = Callable[[Path, Path, float], Run]
"""Runs the job without faults: its directory, its store, its hang deadline in seconds."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The uninterrupted run. ``silence_s`` is the hang deadline that its own pace suggests,
    ``stopped_silence_s`` the one after a rank has been stopped, and ``still_s`` the one while no
    process does anything; see `supervisor.Limits`. An experiment with a ``timeout_s`` of its own
    takes that instead."""

    run: Run
    trajectory: Trajectory
    silence_s: float
    stopped_silence_s: float
    still_s: float
    store: Path


def obtain_reference(experiment: Experiment, root: Path, run_clean: RunClean) -> Reference:
    """The reference, from ``root`` if some process has computed it, else computed now.

    Raises:
        ReferenceFailedError: the job does not finish by itself.
        NondeterministicJobError: two uninterrupted runs differ.
    """
    directory = root / f"reference-{experiment.key}"
    with locked(directory.with_suffix(".lock")):
        if not (directory / "pace").exists():
            _compute(experiment, directory, run_clean)
    run = load_run(directory / "first")
    paces = json.loads((directory / "pace").read_text())
    pace_s, leaving_s = _FACTOR * paces["all_run"], paces["leaving"]
    return Reference(
        run=run,
        trajectory=read_trajectory(run),
        silence_s=max(_SILENCE_S_MIN, pace_s, _FACTOR * leaving_s),
        # Ranks that hang do not leave; those that do all the same are given some time.
        stopped_silence_s=max(_STOPPED_S_MIN, pace_s, _LEAVING_FACTOR * leaving_s),
        still_s=max(_STILL_S_MIN, _STILL_FACTOR * paces["in_steps"]),
        store=directory / "first-store",
    )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compute(experiment: Experiment, directory: Path, run_clean: RunClean) -> None:
    failure = directory / f"failed-{experiment.timeout_s}"  # with more time it may not
    if failure.exists():
        kind, _, message = failure.read_text().partition("\n")
        raise (NondeterministicJobError if kind == "differs" else ReferenceFailedError)(message)
    shutil.rmtree(directory, ignore_errors=True)
    deadline_s = experiment.timeout_s or _FIRST_SILENCE_S
    try:
        first, second = (
            finished(run_clean(directory / name, directory / f"{name}-store", deadline_s))
            for name in ("first", "second")
        )
        _require_equal(experiment, first, second)
    except (NondeterministicJobError, ReferenceFailedError) as error:
        differs = isinstance(error, NondeterministicJobError)
        failure.write_text(f"{'differs' if differs else 'failed'}\n{error}")
        raise
    for name in ("second", "second-store"):
        shutil.rmtree(directory / name, ignore_errors=True)
    (directory / "pace").write_text(json.dumps(_longest_gaps_s(first)))


def finished(run: Run) -> Run:
    if not run.completed:
        last = run.attempts[-1]
        error = run.error_of(last)
        if error is not None and _SAID_TO_USERS & set(error["bases"]):  # type: ignore[call-overload]
            raise ReferenceFailedError(f"the job cannot be run: {error['message']}")
        raise ReferenceFailedError(
            f"the job does not finish even when nothing is done to it: {last.cause}"
            + (f"\n{last.output}" if last.output else "")
        )
    return run


def _require_equal(experiment: Experiment, first: Run, second: Run) -> None:
    """The first must pass against itself, or nothing ever will, and the second must equal it."""
    reference = read_trajectory(first)
    for run in (first, second):
        judgement = judge(
            reference,
            run,
            Schedule(),
            checkpoint_interval=experiment.checkpoint_interval,
            expected_steps=range(1, experiment.steps + 1),
        )
        if run is second and judgement.verdict is Verdict.DIVERGED:
            raise NondeterministicJobError(
                "two uninterrupted runs of the job differ, so no recovery can be judged: first in "
                f"{judgement.component}, {judgement.reason}. Usual causes: "
                f"{'; '.join(NONDETERMINISM_CAUSES)}"
            )
        if judgement.verdict not in (Verdict.RECOVERED, Verdict.LEAKED):
            raise ReferenceFailedError(
                "the job does not pass even when nothing is done to it: "
                f"{judgement.verdict}, {judgement.reason}"
            )


def _longest_gaps_s(run: Run) -> dict[str, float]:
    """The longest times in which no rank recorded anything: while all ran, in steps and saves
    alone, and until all had left.

    How long they took to start is none of it: the supervisor waits for that otherwise.
    """
    traces = [trace for _, _, trace in run.traces() if trace]
    times = sorted(float(str(record["t"])) for trace in traces for record in trace)
    all_run = max(float(str(trace[0]["t"])) for trace in traces)
    began = max(
        float(str(each["t"])) for trace in traces for each in trace if each["kind"] == "began"
    )
    return {
        "all_run": _longest_gap_s(times, since=all_run),
        "in_steps": _longest_gap_s(times, since=began),
        "leaving": run.attempts[-1].ended_t - times[-1],
    }


def _longest_gap_s(times: list[float], *, since: float) -> float:
    return max((b - a for a, b in pairwise(t for t in times if t >= since)), default=0.0)
