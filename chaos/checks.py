"""What can be wrong with a run: one function per question, each yielding what it finds.

Guarantees: every check looks only at evidence that is there; what is missing is a finding, not a
pass. The order of `CHECKS` puts causes before their consequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from signal import Signals

from seatrial.recovery.errors import NoValidCheckpointError

from .actions import BENDING
from .beginnings import beginning_differs
from .bending import ended_by, ineffective_bends, wrongly_published
from .case import Case, Finding, Verdict
from .data import unnoticed_records
from .effects import ineffective_strikes
from .endings import can_end
from .equality import states_are_equal
from .events import STORAGE
from .ledger import Strike
from .own_checkpoints import corruption_accepted, refused
from .run import PREEMPTED, Attempt, Run, all_left
from .samples import sample_faults
from .trace import Record


def was_exercised(case: Case) -> Iterator[Finding]:
    for reason in chain(ineffective_strikes(case), ineffective_bends(case)):
        yield Finding(verdict=Verdict.NOT_EXERCISED, reason=reason)


def lies_were_noticed(case: Case) -> Iterator[Finding]:
    """Bytes that a rank was given wrongly while it restored a step must not be accepted."""
    yield from corruption_accepted(case)
    for number, rank, trace in case.run.traces():
        beginning = case.trajectory.beginning(number)
        accepted = None if beginning is None else beginning.restored
        for record in _misread(trace) if accepted else ():
            # The disk knows what was fetched, perhaps ahead; the state shows whether it was used.
            is_used = record.get("via") != "disk" or _began_wrongly(case, number)
            if record["step"] == accepted and is_used:
                yield Finding(
                    verdict=Verdict.CORRUPTION_UNDETECTED,
                    reason=f"attempt {number} resumed from step {accepted}, though rank {rank} "
                    f"read {record['file']} wrongly ({record['change']})",
                    step=accepted,
                )


def _began_wrongly(case: Case, attempt: int) -> bool:
    beginning = case.trajectory.beginning(attempt)
    return beginning is not None and beginning_differs(case, beginning) is not None


def _misread(trace: list[Record]) -> Iterator[Record]:
    """The damage to what was read between the edges of a restore's own readings."""
    is_reading = False
    for record in trace:
        if record["kind"] == "began":
            return
        name = str(record.get("event", ""))
        if record["kind"] == "event" and name.startswith("restore/"):
            is_reading = name.endswith("/read") and record["edge"] == "before"
        elif record["kind"] == "event" and name.startswith("checkpoint"):
            is_reading = False
        elif record["kind"] == "damage" and is_reading and name == "storage/read":
            yield record


def was_resharded(case: Case) -> Iterator[Finding]:
    """Of a trial of resharded restores, every restart of the route must have restored something."""
    if case.resharded is None:
        return
    route = case.resharded.route
    for number in range(2, len(route.worlds) + 1):
        if not _was_tried(case, number, stays=number == len(route.worlds)):
            yield Finding(
                verdict=Verdict.NOT_EXERCISED,
                reason=f"no checkpoint was restored onto {route.of(number).topology} in attempt "
                f"{number}: a fault must end the attempt before it, after a checkpoint",
            )


def _was_tried(case: Case, number: int, *, stays: bool) -> bool:
    """Whether an attempt, or a later one where the world ``stays``, restored, or was struck then.

    Also if it failed though nothing struck in it: that is for other checks.
    """
    last = case.run.attempts[-1].number
    attempts = range(number, 1 + (last if stays else min(last, number)))
    begun = [each for each in case.trajectory.beginnings if each.attempt in attempts]
    struck = [each for each in case.run.strikes() if each.attempt in attempts]
    if any(_was_in_restore(case, each) for each in struck):
        return True
    # Saved before this world was come to: one that started anew there has nothing to show.
    if any(each.restored and (each.source or 0) < number for each in begun):
        return True
    return bool(attempts and not begun and not struck)


def _was_in_restore(case: Case, strike: Strike) -> bool:
    """Whether a strike came while its rank restored: it reads its store before it begins."""
    if not strike.event.startswith(STORAGE):
        return strike.event.startswith("restore")
    trace = case.run.trace(strike.attempt, strike.rank)
    return not any(r["kind"] == "began" and float(str(r["t"])) <= strike.t for r in trace)


def is_explained(case: Case) -> Iterator[Finding]:
    """Every attempt that did not complete must have been struck by what ends one, and first."""
    for attempt in case.run.attempts:
        if case.damaged_steps and _found_none_valid(case, attempt):
            continue  # refused for what the schedule did: see `ended_well`
        if refused(case, attempt):
            continue
        if attempt.ending == "completed":
            continue
        struck = [strike.t for strike in case.run.strikes() if _explains(case, strike, attempt)]
        verdict = Verdict.HUNG if attempt.ending == "hung" else Verdict.UNRECOVERABLE
        if not struck:
            yield Finding(
                verdict=verdict,
                reason=f"attempt {attempt.number} failed though no fault struck in it: "
                f"{attempt.cause}{_said(attempt)}",
            )
        for rank in range(case.run.ranks_of(attempt.number)) if struck else ():
            if said := _failed_before(min(struck), case.run, attempt, rank):
                yield Finding(
                    verdict=verdict,
                    reason=f"attempt {attempt.number} was failing before a fault struck in it: "
                    f"rank {rank} {said}",
                )


def _failed_before(t: float, run: Run, attempt: Attempt, rank: int) -> str:
    """How a rank failed by itself before ``t``: an exception, as it chose, or killed by whom or
    what no fault is; empty if it did not."""
    trace = run.trace(attempt.number, rank)
    for record in (each for each in trace if float(str(each["t"])) < t):
        if record["kind"] == "error":
            return f"raised {record['type']}: {record['message']}"
        if record["kind"] == "ended" and record["status"]:
            return f"left with exit code {record['status']}"
    status = attempt.exits.get(rank, 0)
    if status in (0, PREEMPTED) or attempt.heard.get(rank, t) >= t:
        return ""
    return (
        f"was killed by {Signals(-status).name}" if status < 0 else f"left with exit code {status}"
    )


def _explains(case: Case, strike: Strike, attempt: Attempt) -> bool:
    """Whether ``attempt`` may have ended of a strike; of a bent call, only if that can be told."""
    bent = strike.action in BENDING
    return can_end(case, strike, attempt) and (not bent or ended_by(case, strike))


def _found_none_valid(case: Case, attempt: Attempt) -> bool:
    """Whether it refused every checkpoint, and rightly: none was valid, or it was spoilt since."""
    error = case.run.error_of(attempt)
    if error is None or error["type"] != NoValidCheckpointError.__name__:
        return False
    before = [each.store.valid for each in case.run.attempts if each.number == attempt.number - 1]
    spoilt = case.damaged_in(attempt.number)
    return all(step in spoilt for valid in before for step in valid)


def _said(attempt: Attempt) -> str:
    lines = attempt.output.splitlines()
    return f" (last output: {lines[-1].strip()})" if lines else ""


def spoilt_records_are_noticed(case: Case) -> Iterator[Finding]:
    for reason, step in unnoticed_records(case.run):
        yield Finding(verdict=Verdict.CORRUPTION_UNDETECTED, reason=reason, step=step)


def store_is_whole(case: Case) -> Iterator[Finding]:
    """What was published, and not damaged by the schedule, must be valid after every attempt."""
    for attempt in case.run.attempts:
        for step, why in sorted(attempt.store.damaged.items()):
            if not case.is_damaged(step, attempt.number):
                yield Finding(
                    verdict=Verdict.TORN,
                    reason=f"after attempt {attempt.number} the published checkpoint of step "
                    f"{step} is damaged, and no fault damaged it: {why}",
                    step=step,
                )


def acknowledged_is_kept(case: Case) -> Iterator[Finding]:
    """The newest checkpoint that was ever acknowledged must be there after every later attempt."""
    acknowledged: dict[int, int] = {}  # step to the attempt that saved it last
    for attempt in case.run.attempts:
        number = attempt.number
        acknowledged |= dict.fromkeys(case.trajectory.published[number], number)
        kept = [
            step
            for step, since in acknowledged.items()
            if not _was_taken(case, step, since, number)
        ]
        newest = max(kept, default=None)
        if newest is not None and newest > (attempt.store.newest_valid or 0):
            yield Finding(
                verdict=Verdict.TORN,
                reason=f"attempt {acknowledged[newest]} acknowledged the checkpoint of step "
                f"{newest}, but after attempt {number} the store's newest valid one is "
                f"{attempt.store.newest_valid}{_after_power_loss(attempt)}",
                step=newest,
            )


def _was_taken(case: Case, step: int, since: int, until: int) -> bool:
    """Whether the schedule damaged the step's checkpoint, at rest or in the reading of it."""
    read = (case.damaged_in(each) for each in range(since + 1, until + 1))
    return case.is_damaged(step, until) or any(step in damaged for damaged in read)


def _after_power_loss(attempt: Attempt) -> str:
    if attempt.store.lost is None:
        return ""
    return f"; after the power loss {'; '.join(attempt.store.lost[:3]) or 'nothing was missing'}"


def resumed_from_newest(case: Case) -> Iterator[Finding]:
    for before, after in pairwise(case.run.attempts):
        beginning = case.trajectory.beginning(after.number)
        if beginning is None:
            continue
        restored = beginning.restored
        # Damaged only when it had been read, if it was restored.
        spoilt = case.damaged_in(after.number) - {restored}
        newest = max((step for step in before.store.valid if step not in spoilt), default=None)
        where = f"attempt {after.number} "
        where += "began anew" if restored is None else f"resumed from step {restored}"
        if restored is not None and restored in before.store.damaged:
            yield Finding(
                verdict=Verdict.CORRUPTION_UNDETECTED,
                reason=f"{where}, whose checkpoint is damaged: {before.store.damaged[restored]}",
                step=restored,
            )
        elif (restored or 0) < (newest or 0):
            yield Finding(
                verdict=Verdict.LOST_WORK,
                reason=f"{where}, though the checkpoint of step {newest} was "
                f"{'acknowledged' if before.store.own else 'valid'}",
                step=restored,
            )
        elif (restored or 0) > (newest or 0) and not before.store.own:
            yield Finding(
                verdict=Verdict.TORN,
                reason=f"{where}, which was never published; the newest valid was {newest}",
                step=restored,
            )


def nothing_wrong_was_published(case: Case) -> Iterator[Finding]:
    """No checkpoint of a state that a bent collective had made wrong."""
    for first, published in wrongly_published(case):
        yield Finding(
            verdict=Verdict.CORRUPTION_UNDETECTED,
            reason=f"attempt {published.attempt} published the checkpoint of step "
            f"{published.number} though its state had been wrong since step {first.number}, by a "
            "fault of a collective that nothing detected",
            step=first.number,
        )


def ended_well(case: Case) -> Iterator[Finding]:
    if case.run.completed:
        return
    last = case.run.attempts[-1]
    after = f"after {len(case.run.attempts)} attempt(s)"
    if last.ending == "hung":
        yield Finding(verdict=Verdict.HUNG, reason=f"gave up {after}: {last.cause}")
    elif not _can_be_resumed(case) and any(case.trajectory.published.values()):
        yield Finding(
            verdict=Verdict.UNRECOVERABLE,
            reason=f"gave up {after}, no valid checkpoint is left: {last.cause}",
        )
    else:
        kept = last.store.newest_valid
        what = f"the checkpoint of step {kept} is valid" if kept else "nothing had been saved"
        yield Finding(verdict=Verdict.STOPPED, reason=f"gave up {after}: {last.cause}; {what}")


def _can_be_resumed(case: Case) -> bool:
    """Whether something valid is left. Of a job's own checkpoints: it has shown that it can."""
    last = case.run.attempts[-1]
    if last.store.own and case.trajectory.beginning(last.number) is None:
        return False
    return last.store.newest_valid is not None


def every_step_was_compared(case: Case) -> Iterator[Finding]:
    numbers = [step.number for step in case.trajectory.lineage()]
    expected = list(case.expected_steps)
    if numbers != expected:
        yield Finding(
            verdict=Verdict.UNRECOVERABLE,
            reason=f"the surviving lineage has the steps {numbers} instead of {expected}",
        )


def samples_are_used_once(case: Case) -> Iterator[Finding]:
    for reason in sample_faults(case.trajectory):
        yield Finding(verdict=Verdict.DIVERGED, reason=reason, component="sampler")


def no_more_lost_than_allowed(case: Case) -> Iterator[Finding]:
    generations = 1 + len(case.damaged_steps)
    allowed = case.checkpoint_interval * generations
    for attempt, lost in zip(case.run.attempts, case.steps_lost(), strict=False):
        if lost > allowed:
            yield Finding(
                verdict=Verdict.LOST_WORK,
                reason=f"{lost} steps of attempt {attempt.number} had to be repeated, more than "
                f"the {allowed} between checkpoints",
            )
        elif lost and set(attempt.exits.values()) == {PREEMPTED}:
            yield Finding(
                verdict=Verdict.LOST_WORK,
                reason=f"attempt {attempt.number} was preempted and said that it had saved, but "
                f"{lost} steps had to be repeated",
            )


def nothing_is_left(case: Case) -> Iterator[Finding]:
    last = case.run.attempts[-1]
    # Ranks that were ended cannot clean up; those that left by themselves can.
    orderly = [
        each for each in case.run.attempts if all_left(each.exits, each.ranks or case.run.ranks)
    ]
    strays = [stray for attempt in orderly for stray in attempt.strays]
    litter = [path for attempt in orderly for path in attempt.litter]
    left = [*strays, *litter, *last.store.leftovers]
    if left:
        shown = ", ".join(left[:3]) + (" …" if len(left) > 3 else "")
        yield Finding(
            verdict=Verdict.LEAKED,
            reason=f"the finished run left {len(left)} thing(s) behind: {shown}",
        )


CHECKS: tuple[Callable[[Case], Iterator[Finding]], ...] = (
    lies_were_noticed,
    was_exercised,
    was_resharded,
    spoilt_records_are_noticed,
    store_is_whole,
    acknowledged_is_kept,
    resumed_from_newest,
    nothing_wrong_was_published,
    states_are_equal,
    is_explained,
    ended_well,
    every_step_was_compared,
    samples_are_used_once,
    no_more_lost_than_allowed,
    nothing_is_left,
)
"""In the order in which a finding is preferred: causes before their consequences."""
