"""Did each fault strike, and did the strike do what it is meant to do?

A strike in the ledger says that a fault was due. Its effect is looked for where it must show: in
how the process ended, in the trace, or in the store. Without both a trial proves nothing.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from itertools import pairwise
from typing import cast

from .actions import BENDING, DAMAGE, DATA, LIES, NETWORK
from .case import Case
from .events import STORAGE
from .fault import Fault
from .ledger import Strike
from .network.evidence import no_effect
from .own_checkpoints import failed_of_it, why_it_proves_nothing, why_not_met
from .run import Run
from .supervisor import PREEMPTED
from .trace import Record
from .unseen import why_unseen
from .witnesses import (
    alterations,
    is_by_disk,
    own_text,
    was_met,
    was_noticed,
    was_passed_on,
    was_told,
    went_on_after,
)

_KILLING = ("kill", "powercut", "crash")
_SIGNAL_S = 1.0
"""A signal is sent within this time of the strike, however busy the machine."""


def ineffective_strikes(case: Case) -> Iterator[str]:
    """A sentence for every fault that did not strike, or struck without effect.

    Damage has an effect only where a restore met it: a checkpoint that nobody reads proves nothing.
    Any other fault must show its effect on every rank that it struck, but for ranks that the
    launcher ended because another struck one had failed already.
    """
    run = case.run
    strikes = run.strikes()
    for index, fault in enumerate(case.schedule.faults):
        own = [strike for strike in strikes if strike.fault == index]
        if not own:
            unseen = f" ({why_unseen(case, fault)})" if fault.at.is_storage else ""
            yield f"the fault '{fault}' never fired: no target rank reached its event{unseen}"
            continue
        vain = next((strike for strike in own if not _could_restore(case, strike)), None)
        if vain is not None:
            yield (
                f"the fault '{fault}' struck rank {vain.rank} at {vain.event} in attempt "
                f"{vain.attempt}, when nothing had been saved that could be restored"
            )
            continue
        if fault.action in DAMAGE:
            if not any(was_met(case, strike) for strike in own):
                yield f"the fault '{fault}' struck, but no restore met what it damaged"
            continue
        if fault.alters_storage:
            yield from _without_effect(case, fault, own)
            continue
        if fault.action in BENDING:
            continue  # see `seatrial.chaos.bending`
        effects = [_had_effect(case, fault, strike) for strike in own]
        if all(effect is not False for effect in effects) and any(effects):
            continue
        strike = own[effects.index(False) if False in effects else 0]
        yield (
            f"the fault '{fault}' fired on rank {strike.rank} in attempt {strike.attempt} "
            f"but changed nothing: {_instead(run, fault, strike)}"
        )


def _could_restore(case: Case, strike: Strike) -> bool:
    """False for a strike in the restore of a job that restores by its own code, and is asked to
    even if nothing is there."""
    if strike.event != "restore" or not case.run.stores_itself:
        return True
    return any(case.trajectory.published[number] for number in range(1, strike.attempt))


def _had_effect(case: Case, fault: Fault, strike: Strike) -> bool | None:
    """None if the launcher ended the rank, so that its own end was not to be seen."""
    run = case.run
    if _was_missed(run, fault, strike):
        return False
    if fault.action in NETWORK:
        return not no_effect(run, fault, strike)
    if fault.action == "stop":
        return _was_stopped(run, fault, strike)
    if fault.action == "delay":
        return _was_delayed(run, strike)
    if fault.action == "spoil":  # what became of the record is for other checks
        trace = run.trace(strike.attempt, strike.rank)
        return any(each["kind"] == "spoilt" and each["fault"] == strike.fault for each in trace)
    status = run.attempts[strike.attempt - 1].exits.get(strike.rank)
    if fault.action == "powercut" and run.attempts[strike.attempt - 1].store.lost is None:
        return False
    if fault.action in ("kill", "powercut"):
        return status == -signal.SIGKILL  # at once, so no launcher comes before it
    if status is None:
        return None
    if fault.action == "exit":
        return status == fault.code and _error(run, strike) is None  # or a worker of it did
    if fault.action == "terminate":
        # Left in time, died of the signal, or was killed when the grace was over.
        if status == -signal.SIGKILL:
            return not _was_killed_otherwise(run, strike)
        if status == PREEMPTED:
            return not _was_told_again(case, strike)
        return status in (-signal.SIGTERM, 128 + signal.SIGTERM)
    if fault.action == "raise" and (error := _error(run, strike)):
        # Of this fault, not of another one that came after the job had swallowed it.
        said = (str(error["message"]), *cast(list[str], error["said"]))
        return any(own_text(fault) in each for each in said)
    # An exception that the job swallowed leaves the process running, perhaps to die of another.
    return status != 0 and not went_on_after(case, strike, strike.step or 0)


def _without_effect(case: Case, fault: Fault, strikes: list[Strike]) -> Iterator[str]:
    """Why an alteration of storage operations proves nothing, if it does not.

    What the job is told of has its effect at once. A lie must be met by a restore, or be noticed:
    an error that names the file. What was renamed, deleted or listed is not looked for again.
    """
    for strike in strikes:
        made = alterations(case, strike)
        said = str(made[-1]["change"]) if made else "the operation failed by itself"
        if not any(record["changed"] for record in made):
            yield f"the fault '{fault}' struck {strike.event}, but could change nothing: {said}"
            return
        is_reading = strike.event == f"{STORAGE}read" and is_by_disk(case, strike)
        if fault.action == "fail" and is_reading and not was_passed_on(case, strike):
            yield (
                f"the fault '{fault}' struck {strike.event}, but only of what the kernel read "
                "ahead: the program was not told"
            )
            return
    if fault.action not in LIES:
        return
    shown = [each for each in strikes if each.event.removeprefix("storage/") in DATA]
    if shown and not any(was_met(case, each) or was_noticed(case, each) for each in shown):
        yield (
            f"the fault '{fault}' struck {shown[0].event}, but neither did a restore meet what it "
            f"changed, nor did an error name the file{why_not_met(case, shown)}"
        )
    elif shown and case.run.stores_itself and not any(was_noticed(case, each) for each in shown):
        doubts = [why_it_proves_nothing(case, each) for each in shown]
        if all(doubts):
            yield (
                f"the fault '{fault}' struck {shown[0].event}, and a rank read what it had "
                f"changed, but {doubts[0]}"
            )


def ended_by_operation(case: Case, strike: Strike) -> bool:
    """Whether an altered operation is why the attempt of ``strike`` ended: it went on until then,
    or an error tells of it."""
    attempt = case.run.attempts[strike.attempt - 1]
    for record in alterations(case, strike):
        lasts_s = record.get("lasts_s")
        if lasts_s and float(str(record["t"])) + float(str(lasts_s)) > attempt.ended_t:
            return True
    if strike.action == "fail":
        # The job may have wrapped the error; its own errors of files say nothing.
        return was_noticed(case, strike) or was_told(case, strike)
    if strike.action not in LIES:
        return False
    may_be = case.run.stores_itself and failed_of_it(case, strike, alone=False)
    return may_be or was_noticed(case, strike)


def _was_missed(run: Run, fault: Fault, strike: Strike) -> bool:
    """Whether the signal found no process, which had not started or was gone, or no switch."""
    return bool(_missed(run, fault, strike))


def _missed(run: Run, fault: Fault, strike: Strike) -> list[Record]:
    attempt = strike.attempt
    return [
        record
        for rank in range(run.ranks_of(attempt))
        for record in run.trace(attempt, rank)
        if record["kind"] == "missed" and record["fault"] == str(fault)
        if record.get("rank") == strike.rank
    ]


def _error(run: Run, strike: Strike) -> Record | None:
    trace = run.trace(strike.attempt, strike.rank)
    return next((record for record in trace if record["kind"] == "error"), None)


def _was_killed_otherwise(run: Run, strike: Strike) -> bool:
    """Whether another fault killed the rank before the grace of ``strike`` was over."""
    return any(
        (each.attempt, each.rank) == (strike.attempt, strike.rank)
        and each.action in _KILLING
        and each.t < strike.t + (strike.grace or 0.0)
        for each in run.strikes()
    )


def _was_told_again(case: Case, strike: Strike) -> bool:
    """Whether the rank went on training, and left only when another fault had told the ranks to.

    Told in the midst of a step, it leaves after that one or the next.
    """
    told = any(
        (each.attempt, each.action) == (strike.attempt, "terminate") and each.t > strike.t
        for each in case.run.strikes()
        if each.fault != strike.fault
    )
    return told and went_on_after(case, strike, (strike.step or 0) + 1)


def _was_stopped(run: Run, fault: Fault, strike: Strike) -> bool:
    """A stopped process records nothing and does not end, until it is continued or killed."""
    attempt = run.attempts[strike.attempt - 1]
    times = _own_times(run, strike)
    if strike.rank not in attempt.exits and not any(t > strike.t + _SIGNAL_S for t in times):
        return True
    return fault.resume is not None and _was_silent(run, strike, fault.resume)


def _was_delayed(run: Run, strike: Strike) -> bool:
    """Whether the thread that was struck slept, whatever others did, or its attempt failed before
    it had slept long enough."""
    trace = run.trace(strike.attempt, strike.rank)
    if any(each["kind"] == "delayed" and each["fault"] == strike.fault for each in trace):
        return True
    attempt = run.attempts[strike.attempt - 1]
    is_cut_short = strike.resume is not None and strike.t + strike.resume > attempt.ended_t
    return is_cut_short and attempt.ending != "completed"


def _was_silent(run: Run, strike: Strike, seconds: float) -> bool:
    """Whether the rank recorded nothing for nearly that long after the strike."""
    attempt = run.attempts[strike.attempt - 1]
    times = _own_times(run, strike)
    after = [strike.t, *(t for t in times if t >= strike.t), attempt.ended_t]
    return any(later - earlier >= 0.9 * seconds for earlier, later in pairwise(after))


def _own_times(run: Run, strike: Strike) -> list[float]:
    """When the struck rank did something. The kernel closes the files of a rank that is killed at
    last, and a disk sees that; only an operation is the rank's own doing."""
    return [
        float(str(record["t"]))
        for record in run.trace(strike.attempt, strike.rank)
        if record.get("via") != "disk" or record["kind"] in ("event", "operation")
    ]


def _instead(run: Run, fault: Fault, strike: Strike) -> str:
    if fault.action in NETWORK:
        why = (r["why"] for r in _missed(run, fault, strike) if "why" in r)
        return str(next(why, None) or no_effect(run, fault, strike))
    attempt = run.attempts[strike.attempt - 1]
    status = attempt.exits.get(strike.rank)
    if status is None:
        return f"the attempt ended otherwise ({attempt.cause or attempt.ending})"
    return f"the rank ended with status {status} ({attempt.cause or attempt.ending})"
