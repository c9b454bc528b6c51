"""Jobs that write their checkpoints by their own code: what is known of those, and who read what.

This project's store can be inspected; a file of ``torch.save`` cannot be told from a damaged one.
So a checkpoint of the job's own is known by its acknowledgement, by what the disk saw a fault do to
its files, and by who read them afterwards. Whether it was right is for the state to show: that of
the restart is compared with the reference bitwise.

Guarantees: bytes that a fault changed, that a rank read before it began, and after which its state
is wrong, are corruption; after which the state is right, they prove nothing.
Torch-free; for `seatrial.chaos.checks`, `seatrial.chaos.effects` and the session.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from .beginnings import beginning_differs
from .case import Case, Finding, Verdict
from .consequences import (
    began_wrongly,
    failed_of,
    fell_back,
    may_have_failed_of,
    met_by_all,
    time_of,
    why_it_may_have_gone_back,
)
from .ledger import Strike
from .run import Attempt, StoreState
from .trace import Record, read_trace
from .trajectory import Beginning

_LONGEST = 120
_TRACE = re.compile(r"attempt(\d+)-rank(\d+)\.")


def state_of(run_directory: Path) -> StoreState | None:
    """What the traces so far tell of the checkpoints of a job; None if it writes none by itself."""
    published: dict[int, int] = {}  # by step, the last attempt
    damaged: dict[int, int] = {}
    is_own = False
    for path in (run_directory / "traces").glob("attempt*.jsonl"):
        found = _TRACE.match(path.name)
        number = int(found[1]) if found else 0
        for record in read_trace(path):
            is_own = is_own or record["kind"] == "stores"
            at_rest = record.get("event") != "storage/read"
            for kind, last in (("published", published), ("damage", damaged)):
                if record["kind"] == kind and at_rest:
                    step = int(str(record["step"]))
                    last[step] = max(number, last.get(step, 0))
    if not is_own:
        return None
    valid = [step for step, last in published.items() if last > damaged.get(step, 0)]
    return StoreState(valid=tuple(sorted(valid)), own=True)


def was_read(case: Case, strike: Strike) -> bool:
    """Whether a rank read, before it began, what the fault had changed."""
    return any(True for _ in _readers(case, strike.fault, since=strike.attempt))


def failed_of_it(case: Case, strike: Strike, *, alone: bool) -> bool:
    """Whether the attempt of the strike failed of what was changed and had been read.

    ``alone``: and no other fault may have been the cause.
    """
    attempt = case.run.attempts[strike.attempt - 1]
    failed = failed_of if alone else may_have_failed_of
    return any(
        failed(case, attempt, rank, record)
        for rank, record in met_by_all(case, attempt)
        if record["fault"] == strike.fault
    )


def refused(case: Case, attempt: Attempt) -> bool:
    """Whether a restart may have failed of what a fault had changed before."""
    if not case.run.stores_itself or case.trajectory.beginning(attempt.number) is not None:
        return False
    return any(
        may_have_failed_of(case, attempt, rank, record)
        for rank, record in met_by_all(case, attempt)
    )


def corruption_accepted(case: Case) -> Iterator[Finding]:
    """Restarts whose state is wrong after they had read what a fault had changed."""
    for attempt in case.run.attempts if case.run.stores_itself else ():
        read = list(met_by_all(case, attempt))
        beginning = case.trajectory.beginning(attempt.number)
        if beginning is None:
            yield from _accepted_by_one(case, attempt, read)
            continue
        before = [(rank, record) for rank, record in read if time_of(record) < beginning.t]
        if beginning.restored is None or not before:
            continue
        wrong = beginning_differs(case, beginning)
        if wrong is not None:
            rank, met = before[0]
            said = _accepted(case, attempt, rank, met, beginning.restored, wrong.reason)
            yield replace(said, component=wrong.component)


def _accepted_by_one(
    case: Case, attempt: Attempt, read: Sequence[tuple[int, Record]]
) -> Iterator[Finding]:
    """Ranks that began with a wrong state, in an attempt in which others never began."""
    for rank, met in read:
        for began in case.run.trace(attempt.number, rank):
            if began["kind"] != "began" or time_of(began) < time_of(met) or not began["restored"]:
                continue
            wrong = began_wrongly(case, attempt.number, began)
            if wrong is not None:
                yield _accepted(case, attempt, rank, met, int(str(began["restored"])), wrong)


def _accepted(
    case: Case, attempt: Attempt, rank: int, met: Record, step: int, wrong: str
) -> Finding:
    fault = case.schedule.faults[int(str(met["fault"]))]
    return Finding(
        verdict=Verdict.CORRUPTION_UNDETECTED,
        reason=f"attempt {attempt.number} resumed from step {step}, though rank {rank} read "
        f"{met['file']} as the fault '{fault}' had left it: {wrong}",
        step=step,
    )


def why_it_proves_nothing(case: Case, strike: Strike) -> str | None:
    """Why it proves nothing that somebody read what was changed; None if it does prove something.

    It does if the attempt failed of it, began with a wrong state, or fell back because of it.
    """
    doubts = []
    for attempt, rank, record in _readers(case, strike.fault, since=strike.attempt):
        beginning = case.trajectory.beginning(attempt.number)
        if beginning is None:
            if failed_of(case, attempt, rank, record):
                return None
            doubts.append(
                f"attempt {attempt.number} ended of something else, as far as can be told, before "
                "it showed what became of that"
            )
        elif beginning_differs(case, beginning) is not None:
            return None
        elif fell_back(beginning, record):
            other = why_it_may_have_gone_back(case, beginning, record)
            if other is None:
                return None
            doubts.append(
                f"that attempt {attempt.number} went back to {_where(beginning)} proves nothing: "
                f"{other}"
            )
    return (
        doubts[0]
        if doubts
        else "the state is right all the same: those bytes do not matter, or the job has them "
        "elsewhere"
    )


def why_not_met(case: Case, strikes: Iterable[Strike]) -> str:
    """The end of a sentence that says so, if somebody read what was changed at once, as for a copy.

    A copy of damaged bytes is not known to be damaged.
    """
    for strike in strikes if case.run.stores_itself else ():
        for rank, record in met_by_all(case, case.run.attempts[strike.attempt - 1]):
            if record["fault"] == strike.fault:
                return (
                    f"; rank {rank} read {record['file']} in the same attempt, perhaps for a copy: "
                    "let the fault strike what the copy is written to"
                )
    return ""


def taken_on_trust(case: Case) -> Iterator[str]:
    """Which attempts count as having failed of what had been read, though no error says so."""
    for attempt in case.run.attempts if case.run.stores_itself else ():
        for rank, record in met_by_all(case, attempt):
            if not failed_of(case, attempt, rank, record):
                continue
            fault = case.schedule.faults[int(str(record["fault"]))]
            ranks = range(case.run.ranks_of(attempt.number))
            errors = [each for r in ranks if (each := case.run.error_of(attempt, r)) is not None]
            error = min((each for each in errors if time_of(each) > time_of(record)), key=time_of)
            if not any(str(record["file"]) in str(each["message"]) for each in errors):
                said = str(error["message"]).partition("\n")[0][:_LONGEST]
                yield (
                    f"attempt {attempt.number} failed after rank {rank} had read {record['file']} "
                    f"as the fault '{fault}' had left it; that it failed of that is likely, but "
                    f"its error does not say so ({error['type']}: {said})"
                )


def _where(beginning: Beginning) -> str:
    return "the start" if beginning.restored is None else f"step {beginning.restored}"


def _readers(case: Case, fault: int, *, since: int) -> Iterator[tuple[Attempt, int, Record]]:
    """Who read in an attempt, before it began, what a fault had changed."""
    for attempt in case.run.attempts[since - 1 :]:
        beginning = case.trajectory.beginning(attempt.number)
        until = attempt.ended_t if beginning is None else beginning.t
        is_first = attempt.number == 1 and beginning is not None
        for rank, record in met_by_all(case, attempt) if not is_first else ():
            if record["fault"] == fault and time_of(record) < until:
                yield attempt, rank, record
