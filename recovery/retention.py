"""What is deleted, and when: leftovers of dead attempts, and checkpoints that are not needed.

The rule: of the published steps, the newest ``keep_last`` are kept, those that ``keep_every``
divides if it is given, and the newest one that is known to be good, however old it is. Known to be
good means restored from with every rank's reads verified, or every digest checked again by
`verify`. If none is known to be good when something is to be deleted, the newest steps are checked
first, and without a good one nothing is deleted.

Guarantees: a step disappears by one rename, made durable before any of its files goes, so that a
crash leaves it whole or gone. What is in quarantine is never deleted. The attempt in
flight is never touched, because collecting happens only after it was published.

Does not: know of other live runs; one run at a time owns a directory. Torch-free; called by the
store on the coordinator.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from .directory import MANIFEST, TRASH_PREFIX, VERIFIED, CheckpointDirectory
from .errors import CheckpointError
from .files import file_problems
from .publish import fsync_directory

__all__ = ["check_rule", "collect", "is_verified", "mark_verified", "quarantine", "superseded"]


def is_verified(directory: CheckpointDirectory, step: int) -> bool:
    """Whether the attempt that is published as ``step`` is known to be good."""
    attempt = directory.verified_attempt(step)
    try:
        return attempt is not None and directory.read_manifest(step).manifest.attempt == attempt
    except (CheckpointError, OSError):
        return False


def mark_verified(directory: CheckpointDirectory, step: int, attempt: str) -> None:
    """Record that every byte of ``attempt`` was found as it was saved."""
    if directory.verified_attempt(step) == attempt:
        return
    # Not fsynced: if it is lost, more is kept than needed.
    temporary = directory.step(step) / f".{VERIFIED}.{secrets.token_hex(8)}.tmp"
    temporary.write_text(json.dumps({"attempt": attempt}) + "\n", "ascii")
    temporary.rename(directory.step(step) / VERIFIED)


def verify(directory: CheckpointDirectory, step: int, *, record: bool = True) -> bool:
    """Check every digest of ``step`` and record it if all are right."""
    try:
        manifest = directory.read_manifest(step).manifest
        problems = file_problems(directory.attempt(step, manifest.attempt), manifest)
    except (CheckpointError, OSError):
        return False
    if not problems and record:
        mark_verified(directory, step, manifest.attempt)
    return not problems


def check_rule(keep_last: int, keep_every: int | None) -> None:
    """Raise `ValueError` unless the rule keeps something."""
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; at least 1 checkpoint must be kept")
    if keep_every is not None and keep_every < 1:
        raise ValueError(f"keep_every is {keep_every}; give a number of steps, 1 or more, or None")


def superseded(
    directory: CheckpointDirectory,
    *,
    keep_last: int,
    keep_every: int | None = None,
    record: bool = True,
) -> list[int]:
    """The published steps that the rule does not keep; with ``record=False`` nothing is written."""
    newest_first = directory.published()[::-1]
    candidates = [
        step for step in newest_first[keep_last:] if keep_every is None or step % keep_every
    ]
    if not candidates:
        return []
    good = next((step for step in newest_first if is_verified(directory, step)), None)
    if good is None:
        good = next((s for s in newest_first if verify(directory, s, record=record)), None)
    if good is None:
        return []
    return [step for step in candidates if step != good]


def collect(
    directory: CheckpointDirectory, *, keep_last: int, keep_every: int | None = None
) -> list[str]:
    """Delete leftovers, and published steps by the rule.

    Returns:
        What was deleted, relative to the directory.
    """
    unneeded = superseded(directory, keep_last=keep_last, keep_every=keep_every)
    steps = [directory.step(step) for step in unneeded]
    doomed = [*directory.leftovers(), *steps]
    collected = []
    trash = []
    for path in doomed:
        gone = _set_aside_for_deletion(directory, path)
        if gone is not None:
            trash.append(gone)
            collected.append(str(path.relative_to(directory.root)))
    if steps:
        fsync_directory(directory.root)
    for path in trash:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return collected


def _set_aside_for_deletion(directory: CheckpointDirectory, path: Path) -> Path | None:
    """Rename ``path`` out of every name that is ever read; None if it is not to be deleted."""
    if path.name.startswith(TRASH_PREFIX) or path.is_symlink() or not path.is_dir():
        return path
    trash = directory.root / f"{TRASH_PREFIX}{secrets.token_hex(8)}"
    was_published = (path / MANIFEST).exists()
    try:
        path.rename(trash)
    except FileNotFoundError:
        return None
    if not was_published and (trash / MANIFEST).exists():
        # Someone published between the look and the rename: that checkpoint is whole.
        with suppress(OSError):
            trash.rename(path)
        return None
    return trash


def quarantine(directory: CheckpointDirectory, step: int, reason: str) -> str:
    """Move the damaged ``step`` aside, with the reason in a JSON file beside it; its new name."""
    directory.quarantine.mkdir(exist_ok=True)
    source = directory.step(step)
    number = 1
    while os.path.lexists(directory.quarantine / f"{source.name}-{number}"):
        number += 1
    name = f"{source.name}-{number}"
    note = directory.quarantine / f"{name}.json"
    note.write_text(json.dumps({"step": step, "reason": reason}, indent=1) + "\n", "utf-8")
    source.rename(directory.quarantine / name)
    fsync_directory(directory.quarantine)
    fsync_directory(directory.root)
    return name
