"""Files that a run wrote or read where no fault of the storage could strike, in words.

A fault must never be silently unable to strike. The disk and the ranks note what went past them
(`seatrial.chaos.observed`); this says it, as the reason of a fault that never fired and as a note
of any trial with faults of the storage. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from .actions import INSIDE
from .case import Case
from .fault import Fault
from .run import Run
from .schedule import Schedule
from .trace import Record

_MOST = 3


def why_unseen(case: Case, fault: Fault) -> str:
    """Why a fault of the storage may have missed its event."""
    run = case.run
    if not _kinds(run, "disk"):
        return "or it stores in a way that is not observed: see --chaos-disk"
    if fault.action in INSIDE:
        return (
            f"{fault.action} strikes where code announces its operations, and not on the disk: "
            "use fail or kill for the operations of other code"
        )
    unread = [
        record
        for _, record in _kinds(run, "unread")
        if fnmatchcase(str(record["file"]), fault.path)
    ]
    if fault.at.name == "storage/read" and unread:
        return (
            f"{unread[0]['file']} was opened, and nothing of it was fetched for that rank: it read "
            "nothing, or what another rank had mapped just before"
        )
    return "; ".join(notes(run)) or "everything that it did on the disk was observed"


def notes_of(run: Run, schedule: Schedule) -> tuple[str, ...]:
    """What no fault could reach, if the trial was about faults of the storage."""
    if not any(fault.at.is_storage for fault in schedule.faults):
        return ()
    return tuple(notes(run))


def notes(run: Run) -> Iterator[str]:
    """What no fault of the storage could reach."""
    elsewhere = _kinds(run, "elsewhere")
    for rank in sorted({rank for rank, _ in elsewhere}):
        files = list(dict.fromkeys(str(r["file"]) for whose, r in elsewhere if whose == rank))
        more = f" and {len(files) - _MOST} more" * (len(files) > _MOST)
        yield (
            f"rank {rank} wrote {', '.join(files[:_MOST])}{more}, where no fault of the storage "
            "can strike"
        )
    if any(record["watched"] is False for _, record in _kinds(run, "disk")):
        yield "what native code wrote beside the disk is not known: that takes root"
    for _, record in _kinds(run, "stranger")[:1]:
        yield (
            f"{record['file']} was changed by a process of no rank, {record['pid']} "
            f"({record['command']}), so no fault struck there"
        )


def _kinds(run: Run, kind: str) -> list[tuple[int, Record]]:
    """``(rank, record)`` of all records of one kind."""
    return [
        (rank, record)
        for _, rank, trace in run.traces()
        for record in trace
        if record["kind"] == kind
    ]
