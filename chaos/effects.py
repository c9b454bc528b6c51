"""Did each fault strike, and did the strike do what it is meant to do?

A strike in the ledger says that a fault was due. Its effect is looked for where it must show: in
how the process ended, in the trace, or in the store. Without both a trial proves nothing.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

from .fault import DAMAGE, Fault
from .ledger import Strike
from .run import Attempt, Run
from .schedule import Schedule
from .supervisor import PREEMPTED


def ineffective_strikes(run: Run, schedule: Schedule) -> Iterator[str]:
    """A sentence for every fault that did not strike, or struck without effect."""
    strikes = run.strikes()
    for index, fault in enumerate(schedule.faults):
        own = [strike for strike in strikes if strike.fault == index]
        if not own:
            yield f"the fault '{fault}' never fired: no target rank reached its event"
        elif not any(_had_effect(run, fault, strike) for strike in own):
            strike = own[0]
            yield (
                f"the fault '{fault}' fired on rank {strike.rank} in attempt {strike.attempt} "
                f"but changed nothing: {_instead(run, strike)}"
            )


def _had_effect(run: Run, fault: Fault, strike: Strike) -> bool:
    attempt = run.attempts[strike.attempt - 1]
    status = attempt.exits.get(strike.rank)
    if fault.action in DAMAGE:
        steps = [
            record["step"]
            for record in run.trace(strike.attempt, strike.rank)
            if record["kind"] == "damage"
        ]
        return bool(steps) and not any(step in attempt.store.valid for step in steps)
    if fault.action == "kill":
        return status == -signal.SIGKILL
    if fault.action == "exit":
        return status == fault.code
    if fault.action == "terminate":
        # Left in time, died of the signal, or was killed when the grace was over.
        return status in (PREEMPTED, -signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM)
    if fault.action == "stop":
        return _was_stopped(attempt, fault, strike)
    # An exception that the job swallowed leaves the process running, perhaps to die of another.
    return status not in (None, 0) and not _went_on(run, strike)


def _went_on(run: Run, strike: Strike) -> bool:
    """Whether the rank completed a later step in the attempt in which it was struck."""
    return any(
        record["kind"] == "step" and int(str(record["step"])) > (strike.step or 0)
        for record in run.trace(strike.attempt, strike.rank)
    )


def _was_stopped(attempt: Attempt, fault: Fault, strike: Strike) -> bool:
    """A stopped process does not end by itself before it is continued."""
    held_s = attempt.ended_t - strike.t
    if fault.resume is not None:
        return held_s >= fault.resume
    return strike.rank not in attempt.exits


def _instead(run: Run, strike: Strike) -> str:
    attempt = run.attempts[strike.attempt - 1]
    status = attempt.exits.get(strike.rank)
    if status is None:
        return f"the attempt ended otherwise ({attempt.cause or attempt.ending})"
    return f"the rank ended with status {status} ({attempt.cause or attempt.ending})"
