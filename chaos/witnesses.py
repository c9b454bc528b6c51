"""Who came upon what a fault changed: an error that tells of it, or a restore that met the damage.

Guarantees: a witness names the very file that was changed, in the directory of its step, wherever
more than one fault could be meant; an error that another fault raised is no witness.
Does not: judge what the witness made of it. Called by `seatrial.chaos.effects`.
"""

from __future__ import annotations

import os
import re
import signal
from typing import cast

from seatrial.recovery.errors import NoValidCheckpointError

from .actions import ERRORS, LIES
from .case import Case
from .events import STORAGE
from .fault import Fault
from .ledger import Strike
from .own_checkpoints import failed_of_it, was_read
from .run import StoreState
from .storage.alteration import INJECTED
from .trace import Record

_STEP = re.compile(r"step-(\d+)/")


def alterations(case: Case, strike: Strike) -> list[Record]:
    """What the fault of ``strike`` made of operations in that attempt."""
    trace = case.run.trace(strike.attempt, strike.rank)
    return [r for r in trace if r["kind"] == "operation" and r["fault"] == strike.fault]


def was_noticed(case: Case, strike: Strike) -> bool:
    """Whether a rank of the same attempt failed with an error that names what was changed.

    Where a job stores by itself it need not say so: it is enough that it had read it.
    """
    if case.run.stores_itself and failed_of_it(case, strike, alone=True):
        return True
    changed = [record for record in alterations(case, strike) if record["changed"]]
    files = {name for record in changed for name in _names(str(record["file"]))}
    # A directory cannot be deleted in which a file was left.
    full = {
        os.path.dirname(str(record["file"]))
        for record in changed
        if strike.action in LIES and record["event"] == f"{STORAGE}delete"
    }
    fault = case.schedule.faults[strike.fault]
    return any(
        any(_is_named(file, message) for file in files)
        or any(_is_named(each, message, is_all=True) for each in full)
        for message in (str(error["message"]) for _, error in _errors_after(case, strike))
        if INJECTED not in message or own_text(fault) in message
    )


def was_told(case: Case, strike: Strike) -> bool:
    """Whether a rank failed with the error that a ``fail`` raised, as it was or wrapped.

    Wrapped in silence it is known only by its class: on the struck rank, or by an error that names
    that rank, and if no later step shows that the job had dealt with it.
    """
    fault = case.schedule.faults[strike.fault]
    number = ERRORS[fault.error]
    own = type(OSError(number, "")).__name__
    went_on = went_on_after(case, strike, _last_step(case, strike))
    for rank, error in _errors_after(case, strike):
        message = str(error["message"])
        if own_text(fault) in message:
            return True
        concerns = rank == strike.rank or re.search(rf"\brank {strike.rank}\b", message)
        is_left = bool(_not_overcome(case, strike, error))
        if concerns and not went_on and is_left and own in cast(list[str], error["causes"]):
            return True
        if is_by_disk(case, strike) and concerns and not went_on:
            # The kernel passes on a number and no text; native code may not even pass that on.
            if os.strerror(number) in message or f"os error {number}" in message:
                return True
            if rank == strike.rank and _is_next(case, strike, error):
                return True
    if strike.event != f"{STORAGE}read":
        return False
    # What a program reads through a mapping cannot be refused in another way.
    exits = case.run.attempts[strike.attempt - 1].exits
    return is_by_disk(case, strike) and exits.get(strike.rank) == -signal.SIGBUS


def was_passed_on(case: Case, strike: Strike) -> bool:
    """Whether the kernel has told the program that a reading failed. It does not where it had only
    read ahead; it asks again for what is needed, and the disk refuses that as well."""
    files = [record["file"] for record in alterations(case, strike)]
    trace = case.run.trace(strike.attempt, strike.rank)
    told = any(record["kind"] == "told" and record["file"] in files for record in trace)
    return told or was_noticed(case, strike) or was_told(case, strike)


def is_by_disk(case: Case, strike: Strike) -> bool:
    """Whether the disk altered the operation, and not the rank itself."""
    return any(record.get("via") == "disk" for record in alterations(case, strike))


def _is_next(case: Case, strike: Strike, error: Record) -> bool:
    """Whether the rank announced nothing between the last refusal and its error.

    What was dealt with is no refusal any more.
    """
    refused = _not_overcome(case, strike, error)
    return bool(refused) and not any(
        max(refused) < float(str(record["t"])) < float(str(error["t"]))
        and record["kind"] in ("event", "step", "began", "published")
        and record.get("via") != "disk"
        for record in case.run.trace(strike.attempt, strike.rank)
    )


def _not_overcome(case: Case, strike: Strike, error: Record) -> list[float]:
    """When operations were refused that had not been tried again with success before the error, as
    far as the disk saw it."""
    overcome = [
        record
        for record in case.run.trace(strike.attempt, strike.rank)
        if record["kind"] == "overcome" and float(str(record["t"])) < float(str(error["t"]))
    ]
    return [
        float(str(made["t"]))
        for made in alterations(case, strike)
        if not any(
            (made["event"], made["file"]) == (again["event"], again["file"])
            and float(str(made["t"])) < float(str(again["t"]))
            for again in overcome
        )
    ]


def went_on_after(case: Case, strike: Strike, step: int) -> bool:
    """Whether the struck rank completed a step after ``step`` in that attempt."""
    return any(
        record["kind"] == "step" and int(str(record["step"])) > step
        for record in case.run.trace(strike.attempt, strike.rank)
    )


def was_met(case: Case, strike: Strike) -> bool:
    """Whether a restore came upon the damage; what it made of it is for other checks."""
    if case.run.stores_itself:
        return was_read(case, strike)
    began = False
    for record in case.run.trace(strike.attempt, strike.rank):
        began = began or record["kind"] == "began"
        if record["kind"] == "damage" and record["fault"] == strike.fault:
            is_in_restore = not began and strike.attempt > 1
            first = strike.attempt + (0 if is_in_restore else 1)
            if _step_was_met(case, strike, record, first):
                return True
    return False


def _step_was_met(case: Case, strike: Strike, damage: Record, first: int) -> bool:
    """Whether the first restore of attempt ``first`` or later that could, met the damage."""
    fault = case.schedule.faults[strike.fault]
    damaged = int(str(damage["step"]))
    for attempt in case.run.attempts[first - 1 :]:
        before = case.run.attempts[attempt.number - 2].store
        beginning = case.trajectory.beginning(attempt.number)
        if beginning is None:
            error = case.run.error_of(attempt)
            if error is None or error["type"] != NoValidCheckpointError.__name__:
                continue
            if _is_told_of(case, damage, str(error["message"]), before):
                return True
            continue
        if attempt.number == strike.attempt and beginning.restored == damaged:
            continue  # damaged when it had been read
        reasons = [reason for step, reason in beginning.damaged if step == damaged]
        if reasons:
            return _is_told_of(case, damage, " ".join(reasons), before)
        # Of the first restore after the damage the newest checkpoint is the first candidate.
        if damaged in before.damaged:
            is_there = _is_told_of(case, damage, "", before)
        else:
            is_there = _is_unpublished(fault, damaged, before)
        return is_there and damaged > (before.newest_valid or 0)
    return False


def _is_unpublished(fault: Fault, damaged: int, before: StoreState) -> bool:
    is_removed = fault.action == "remove" and fault.part == "manifest"
    return is_removed or (fault.action in LIES and damaged not in before.valid)


def _is_told_of(case: Case, damage: Record, reasons: str, before: StoreState) -> bool:
    """Whether the reasons for which a step was rejected are about this damage.

    A reason need not name a file where only one fault damaged the step. A manifest's content is
    found wrong without its name.
    """
    step = int(str(damage["step"]))
    if len(_faults_that_damaged(case, step)) < 2:
        return True
    said = f"{reasons} {before.damaged.get(step, '')}"
    names = _names(str(damage["file"]), step, change=str(damage["change"]))
    if any(_is_named(name, said) for name in names):
        return True
    is_manifest = "/manifest" in str(damage["file"])
    return is_manifest and bool(said.strip()) and not _STEP.search(said)


def _faults_that_damaged(case: Case, step: int) -> set[object]:
    return {
        record["fault"]
        for _, _, trace in case.run.traces()
        for record in trace
        if record["kind"] == "damage" and record["step"] == step
    }


def _names(file: str, step: int | None = None, *, change: str = "") -> list[str]:
    """The files in both from the directory of their step on, or only of one ``step``.

    A swap changes two. A file that is in no step's directory is known by its name and that of the
    directory above it: many programs have a ``model.pt``.
    """
    number = r"\d+" if step is None else rf"0*{step}"
    found = re.findall(rf"step-{number}/\S+", f"{file} {change}")
    return found or ["/".join(file.split("/")[-2:])]


def _is_named(name: str, message: str, *, is_all: bool = False) -> bool:
    """Whether a message names that file, and not one whose name only contains it.

    ``is_all``: nor one below it.
    """
    more = "/" * is_all
    return bool(re.search(rf"(?<![\w.{more}-]){re.escape(name)}(?![\w{more}-]|\.\w)", message))


def own_text(fault: Fault) -> str:
    """What the errors say that ``fault`` raises, and those of no other."""
    return f"{INJECTED}{fault}'"


def _last_step(case: Case, strike: Strike) -> int:
    """The last step in which the fault altered an operation, as far as file names tell."""
    files = [str(record["file"]) for record in alterations(case, strike)]
    steps = [int(number) for file in files for number in _STEP.findall(file)]
    return max([strike.step or 0, *steps])


def _errors_after(case: Case, strike: Strike) -> list[tuple[int, Record]]:
    """``(rank, error)`` of the ranks that failed after the strike."""
    attempt = case.run.attempts[strike.attempt - 1]
    ranks = range(case.run.ranks_of(strike.attempt))
    errors = [(rank, case.run.error_of(attempt, rank)) for rank in ranks]
    return [
        (rank, error)
        for rank, error in errors
        if error is not None and float(str(error["t"])) >= strike.t
    ]
