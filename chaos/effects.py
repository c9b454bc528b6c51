"""Did each fault strike, and did the strike do what it is meant to do?

A strike in the ledger says that a fault was due. Its effect is looked for where it must show: in
how the process ended, in the trace, or in the store. Without both a trial proves nothing.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from seatrial.recovery.errors import NoValidCheckpointError

from .fault import DAMAGE, Fault
from .ledger import Strike
from .run import Run
from .schedule import Schedule
from .supervisor import PREEMPTED
from .trajectory import Trajectory


def ineffective_strikes(run: Run, trajectory: Trajectory, schedule: Schedule) -> Iterator[str]:
    """A sentence for every fault that did not strike, or struck without effect.

    Damage has an effect only where a restore met it: a checkpoint that nobody reads proves nothing.
    A kill must end every rank that it struck.
    """
    strikes = run.strikes()
    for index, fault in enumerate(schedule.faults):
        own = [strike for strike in strikes if strike.fault == index]
        if not own:
            yield f"the fault '{fault}' never fired: no target rank reached its event"
        elif fault.action in DAMAGE:
            if not any(_was_met(run, trajectory, fault, strike) for strike in own):
                yield f"the fault '{fault}' struck, but no restore met what it damaged"
        elif not _all_or_any(fault)(_had_effect(run, fault, strike) for strike in own):
            strike = next(each for each in own if not _had_effect(run, fault, each))
            yield (
                f"the fault '{fault}' fired on rank {strike.rank} in attempt {strike.attempt} "
                f"but changed nothing: {_instead(run, strike)}"
            )


def _had_effect(run: Run, fault: Fault, strike: Strike) -> bool:
    attempt = run.attempts[strike.attempt - 1]
    status = attempt.exits.get(strike.rank)
    if fault.action == "kill":
        return status == -signal.SIGKILL
    if fault.action == "exit":
        return status == fault.code
    if fault.action == "terminate":
        # Left in time, died of the signal, or was killed when the grace was over.
        return status in (PREEMPTED, -signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM)
    if fault.action == "stop":
        return _was_stopped(run, fault, strike)
    # An exception that the job swallowed leaves the process running, perhaps to die of another, or
    # to be ended by the launcher when a peer fails.
    return status not in (None, 0, -signal.SIGTERM) and not _went_on(run, strike)


def _all_or_any(fault: Fault) -> Callable[[Iterable[bool]], bool]:
    return all if fault.action == "kill" else any


def _was_met(run: Run, trajectory: Trajectory, fault: Fault, strike: Strike) -> bool:
    """Whether a restore came upon the damage; what it made of it is for other checks."""
    trace = run.trace(strike.attempt, strike.rank)
    mine = [r for r in trace if r["kind"] == "damage" and r["fault"] == strike.fault]
    if not mine:
        return False
    damaged = int(str(mine[0]["step"]))
    is_in_restore = strike.event.startswith("restore")
    for attempt in run.attempts[strike.attempt - 1 if is_in_restore else strike.attempt :]:
        beginning = trajectory.beginning(attempt.number)
        if beginning is None:
            error = run.error_of(attempt)
            if error is not None and error["type"] == NoValidCheckpointError.__name__:
                return True
            continue
        if damaged in [step for step, _ in beginning.damaged]:
            return True
        # Of the first restore after the damage the newest checkpoint is the first candidate.
        before = run.attempts[attempt.number - 2].store
        is_gone = fault.action == "remove" and fault.part == "manifest"
        is_there = is_gone or damaged in before.damaged
        return is_there and damaged > (before.newest_valid or 0)
    return False


def _went_on(run: Run, strike: Strike) -> bool:
    """Whether the rank completed a later step in the attempt in which it was struck."""
    return any(
        record["kind"] == "step" and int(str(record["step"])) > (strike.step or 0)
        for record in run.trace(strike.attempt, strike.rank)
    )


def _was_stopped(run: Run, fault: Fault, strike: Strike) -> bool:
    """A stopped process records nothing and does not end before it is continued."""
    attempt = run.attempts[strike.attempt - 1]
    if fault.resume is None:
        return strike.rank not in attempt.exits
    times = [float(str(record["t"])) for record in run.trace(strike.attempt, strike.rank)]
    after = [strike.t, *(t for t in times if t >= strike.t), attempt.ended_t]
    return any(later - earlier >= 0.9 * fault.resume for earlier, later in pairwise(after))


def _instead(run: Run, strike: Strike) -> str:
    attempt = run.attempts[strike.attempt - 1]
    status = attempt.exits.get(strike.rank)
    if status is None:
        return f"the attempt ended otherwise ({attempt.cause or attempt.ending})"
    return f"the rank ended with status {status} ({attempt.cause or attempt.ending})"
