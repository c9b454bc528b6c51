"""Runs a job to its end through as many attempts as it takes, as torchrun would, and watches it.

Guarantees: the first rank to fail ends the attempt for all; an attempt in which no rank records
anything for `Limits.silence_s` is ended as hung (no process-group timeout is relied upon); when
`supervise` returns or raises, no process of the run is left. Sends the signals that a struck
process cannot send itself: SIGKILL after a preemption's grace, SIGCONT after a stop.

Torch-free; runs in pytest's process.
"""

from __future__ import annotations

import shutil
import signal
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from .collectives.last_calls import behind, last_calls, read_all
from .errors import LaunchError
from .hang import look_at_hang
from .inject import pid_file
from .launch.launcher import Launcher, RankExit
from .launch.plan import AttemptPlan, Workload, World
from .ledger import Ledger, Strike
from .litter import files_left, segments, segments_left
from .network.evidence import cut_off
from .route import Route
from .run import PREEMPTED, Attempt, Ending, Run, StoreState, all_left
from .schedule import Schedule
from .silence import Limits, Silence
from .stillness import is_exiting
from .trace import Record, read_last, read_trace

__all__ = ["PREEMPTED", "Assignment", "Limits", "Progress", "supervise"]

_POLL_S = 0.05
_STRUCK_S = 2.0
_EXITING_S = 60.0
"""How long the end of a rank may take: that of one with much memory takes seconds."""
_FATAL = ("kill", "powercut", "exit", "raise", "oom", "terminate", "crash")
_OUTPUT_LINES = 25

Progress = Callable[[int, int], None]
"""Called with the attempt and the step that rank 0 has reached."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """One run to be supervised. ``inspect`` looks at the store between attempts.

    ``route`` says which attempt has which world, if not all have ``world``.
    """

    workload: Workload
    world: World
    schedule: Schedule
    seed: int
    limits: Limits
    store: str
    directory: Path
    inspect: Callable[[str], StoreState]
    route: Route | None = None


def supervise(
    assignment: Assignment, launcher: Launcher, *, progress: Progress | None = None, note: str = ""
) -> Run:
    """Run the job to its end, or until the limits are reached."""
    began = time.monotonic()
    attempts: list[Attempt] = []
    for number in range(1, assignment.limits.max_restarts + 2):
        try:
            attempts.append(_attempt(assignment, launcher, number, began, progress))
        except LaunchError:
            raise  # there is nobody left to ask
        except BaseException:
            launcher.stop()
            raise
        if attempts[-1].ending == "completed" or _over(assignment, began):
            break
    run = Run(
        directory=assignment.directory,
        ranks=assignment.world.ranks,
        attempts=tuple(attempts),
        total_s=time.monotonic() - began,
        note=note,
    )
    run.save()
    return run


def _over(assignment: Assignment, began: float) -> bool:
    return time.monotonic() - began > assignment.limits.total_s


def _attempt(
    assignment: Assignment,
    launcher: Launcher,
    number: int,
    began: float,
    progress: Progress | None,
) -> Attempt:
    plan = _plan(assignment, number)
    before = segments()
    launched = time.monotonic()
    launcher.launch(plan)
    watch = _Watch(plan, launcher, assignment.limits, progress)
    ending = watch.until_it_ends(began + assignment.limits.total_s)
    ended = time.monotonic()
    stacks: tuple[str, ...] = ()
    if ending == "hung":
        stacks = look_at_hang(plan, launcher, is_explained=watch.silence.is_explained)
    strays = launcher.stop()
    culprit = watch.culprit()
    calls = read_all({rank: plan.calls_file(rank) for rank in range(plan.world.ranks)})
    exits = {each.rank: each.status for each in watch.exits if each.status is not None}
    causes = [watch.cause(ending)]
    if ending == "hung":
        causes += [cut_off(read_trace(plan.network_file), plan.world), behind(calls)]
    return Attempt(
        number=number,
        ending=ending,
        launched_t=launched,
        ended_t=ended,
        exits=exits,
        heard={each.rank: each.t for each in watch.exits if each.status is not None},
        culprit=culprit,
        cause="; ".join(filter(None, causes)),
        output=_tail(plan, culprit) if ending != "completed" else "",
        strays=tuple(strays),
        litter=_clean_up(plan, before, all_left(exits, plan.world.ranks)),
        store=assignment.inspect(assignment.store),
        ranks=plan.world.ranks,
        calls=tuple(last_calls(calls)) if ending != "completed" else (),
        stacks=stacks,
    )


def _clean_up(
    plan: AttemptPlan, before: Collection[tuple[Path, int]], orderly: bool
) -> tuple[str, ...]:
    """Remove what the attempt left on the machine; what that was, if its ranks could have."""
    temporary = Path(plan.directory) / "tmp"
    pids, mapped = set(), set()
    for rank in range(plan.world.ranks):
        for record in read_trace(plan.trace_file(rank)):
            if record["kind"] in ("process", "forked"):
                pids.add(int(str(record["pid"])))
            mapped.update(cast(list[str], record.get("segments", [])))
    segments = segments_left(before, pids=pids, mapped=mapped)
    litter = (*files_left(temporary), *map(str, segments)) if orderly else ()
    for path in segments:
        path.unlink(missing_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    return litter


def _plan(assignment: Assignment, number: int) -> AttemptPlan:
    return AttemptPlan(
        workload=assignment.workload,
        world=assignment.world if assignment.route is None else assignment.route.of(number),
        schedule=str(assignment.schedule),
        seed=assignment.seed,
        attempt=number,
        max_restarts=assignment.limits.max_restarts,
        # The supervisor's own deadline comes first; this one is for a job that outlives it.
        timeout_s=2 * assignment.limits.silence_s,
        master_port=_free_port(),
        store=assignment.store,
        run_directory=str(assignment.directory),
        directory=str(assignment.directory / f"attempt{number}"),
    )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class _Watch:
    """Follows one attempt until it ends."""

    def __init__(
        self, plan: AttemptPlan, launcher: Launcher, limits: Limits, progress: Progress | None
    ) -> None:
        self._plan = plan
        self._launcher = launcher
        self._progress = progress
        self._ledger = Ledger(Path(plan.run_directory) / "strikes")
        self._traces = [plan.trace_file(rank) for rank in range(plan.world.ranks)]
        self._signalled: set[tuple[int, int]] = set()
        self.silence = Silence(self._traces, limits, launcher.processes)
        self.exits: list[RankExit] = []
        self._limits = limits
        self._is_too_late = False

    def until_it_ends(self, deadline: float) -> Ending:
        while True:
            self.exits += self._launcher.exits(timeout_s=_POLL_S)
            # Ranks that save and leave do so together; the others are given the time.
            if any(each.status not in (0, PREEMPTED) for each in self.exits):
                self._await_struck()
                return "failed"
            if len(self.exits) == self._plan.world.ranks:
                return "failed" if any(each.status for each in self.exits) else "completed"
            self._send_due_signals()
            if self.silence.is_a_hang(self._strikes()):
                return "hung"
            if time.monotonic() > deadline:
                self._is_too_late = True
                return "hung"
            self._report_progress()

    def _report_progress(self) -> None:
        if self._progress and self.silence.is_broken:
            record = read_last(self._traces[0], "event")
            step = record.get("step") if record else None
            self._progress(self._plan.attempt, step if isinstance(step, int) else 0)

    def _await_struck(self) -> None:
        """A survivor may be heard of before the rank that was struck; its exit is evidence."""
        began = time.monotonic()
        ranks = range(len(self._traces))
        while True:
            self.exits += self._launcher.exits(timeout_s=0)
            awaited = {each.rank for each in self._strikes() if each.action in _FATAL}
            # So is that of a rank that has said what it fails of and is still cleaning up.
            awaited |= {rank for rank in ranks if self._failure(rank)}
            # And of one that has begun to leave: a peer may have failed of that, and be gone first.
            exiting = {rank for rank in ranks if self._is_exiting(rank)}
            missing = (awaited | exiting) - {each.rank for each in self.exits}
            limit_s = _EXITING_S if missing & exiting else _STRUCK_S
            if not missing or time.monotonic() > began + limit_s:
                return
            self.exits += self._launcher.exits(timeout_s=_POLL_S)

    def _is_exiting(self, rank: int) -> bool:
        try:
            pid = int(pid_file(Path(self._plan.directory), rank).read_text())
        except (OSError, ValueError):
            return False
        return is_exiting(pid)

    def _send_due_signals(self) -> None:
        now = time.monotonic()
        for strike in self._strikes():
            stopped_for = strike.resume if strike.action == "stop" else None
            for delay, number in ((strike.grace, signal.SIGKILL), (stopped_for, signal.SIGCONT)):
                key = (strike.fault, strike.rank)
                if delay is not None and now >= strike.t + delay and key not in self._signalled:
                    self._signalled.add(key)
                    self._launcher.signal(strike.rank, number)

    def _strikes(self) -> list[Strike]:
        return [each for each in self._ledger.strikes() if each.attempt == self._plan.attempt]

    def culprit(self) -> int | None:
        """The rank that failed first, one that was struck before any other.

        Not the one that was first to be gone: a rank that fails may take longer to leave than a
        peer to notice. One that vanished without an error of its own cannot have failed of a
        peer's.
        """
        struck = {each.rank for each in self._strikes()}

        def order(each: RankExit) -> tuple[bool, bool, float]:
            said = self._failure(each.rank)
            t = float(str(said["t"])) if said else each.t
            return each.rank not in struck, said is not None, t

        failed = sorted((each for each in self.exits if each.status), key=order)
        return failed[0].rank if failed else None

    def _failure(self, rank: int) -> Record | None:
        """What a rank recorded of its own failure: an exception, or that it chose to leave."""
        if error := self._error(rank):
            return error
        ended = read_last(self._traces[rank], "ended")
        return ended if ended and ended["status"] else None

    def _error(self, rank: int) -> Record | None:
        return read_last(self._traces[rank], "error")

    def cause(self, ending: Ending) -> str:
        if ending == "completed":
            return ""
        if self._is_too_late:
            return (
                f"its ranks were at work, but the run was not over after "
                f"{self._limits.total_s:g} s, the most that a run may take (--chaos-run-limit)"
            )
        if ending == "hung":
            return str(self.silence)
        culprit = self.culprit()
        status = next(each.status or 1 for each in self.exits if each.rank == culprit)
        if status == PREEMPTED:
            return f"rank {culprit} saved and left: it was preempted"
        if status < 0:
            return f"rank {culprit} was killed by {signal.Signals(-status).name}"
        error = self._error(culprit or 0)
        said = f": {error['type']}: {error['message']}" if error else ""
        return f"rank {culprit} left with exit code {status}{said}"


def _tail(plan: AttemptPlan, rank: int | None) -> str:
    """The last lines that the culprit printed, or the launcher if no rank printed anything."""
    for path in (plan.output_file(rank or 0), Path(plan.directory) / "launch.log"):
        if path.exists() and (text := path.read_text(errors="replace").strip()):
            return "\n".join(text.splitlines()[-_OUTPUT_LINES:])
    return ""
