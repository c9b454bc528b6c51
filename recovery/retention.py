"""What is deleted, and when: leftovers of dead attempts, and checkpoints that are not needed.

The rule: of the published steps, the newest ``keep_last`` are kept, those that ``keep_every``
divides if it is given, and the newest one that is known to be good, however old it is. Known to be
good means restored from with every rank's reads verified, or every digest checked again by
`verify`. If none is known to be good when something is to be deleted, the newest steps are checked
first, and without a good one nothing is deleted.

Guarantees: a step disappears at once and before any of its files, so that a crash leaves it whole
or gone (how, is the storage's business). What is in quarantine is never deleted. The attempt in
flight is never touched, because collecting happens only after it was published.

Does not: know of other live runs; one run at a time owns a directory. Torch-free; called by the
store on the coordinator.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from .directory import CheckpointDirectory
from .errors import CheckpointError
from .files import file_problems

__all__ = ["check_rule", "collect", "is_verified", "note_verified", "unneeded", "verify"]


def is_verified(directory: CheckpointDirectory, step: int) -> bool:
    """Whether the attempt that is published as ``step`` is known to be good."""
    attempt = directory.verified_attempt(step)
    try:
        return attempt is not None and directory.read_manifest(step).manifest.attempt == attempt
    except (CheckpointError, OSError):
        return False


def verify(directory: CheckpointDirectory, step: int, *, record: bool = True) -> bool:
    """Check every digest of ``step`` and record it if all are right."""
    try:
        manifest = directory.read_manifest(step).manifest
        problems = file_problems(directory.files(manifest), manifest)
    except (CheckpointError, OSError):
        return False
    if not problems and record:
        directory.mark_verified(step, manifest.attempt)
    return not problems


def note_verified(directory: CheckpointDirectory, step: int, attempt: str) -> None:
    """Note that every byte of ``attempt`` was found as it was saved, or warn that it cannot be.

    What was restored or verified is so, whether it can be noted or not.
    """
    try:
        directory.mark_verified(step, attempt)
    except OSError as error:
        warnings.warn(
            f"it could not be noted that step {step} is verified, so it is kept: {error}",
            RuntimeWarning,
            stacklevel=4,
        )


def check_rule(keep_last: int, keep_every: int | None) -> None:
    """Raise `ValueError` unless the rule keeps something."""
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if isinstance(value, bool) or not (value is None or hasattr(value, "__index__")):
            raise ValueError(f"{name} is {value!r}; give a whole number")
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; at least 1 checkpoint must be kept")
    if keep_every is not None and keep_every < 1:
        raise ValueError(f"keep_every is {keep_every}; give a number of steps, 1 or more, or None")


@dataclass(frozen=True, kw_only=True)
class Unneeded:
    """What can be deleted: leftovers by name, relative to the directory, and published steps."""

    leftovers: Sequence[str]
    steps: Sequence[int]


def unneeded(
    directory: CheckpointDirectory,
    *,
    keep_last: int,
    keep_every: int | None = None,
    record: bool = True,
) -> Unneeded:
    """Leftovers, and what the rule does not keep; with ``record=False`` nothing is written."""
    found = directory.storage.contents()
    newest_first = found.published[::-1]
    candidates = [
        step for step in newest_first[keep_last:] if keep_every is None or step % keep_every
    ]
    if candidates:
        noted = (step for step in newest_first if step in found.noted)
        good = next((step for step in noted if is_verified(directory, step)), None)
        if good is None:
            good = next((s for s in newest_first if verify(directory, s, record=record)), None)
        candidates = [] if good is None else [step for step in candidates if step != good]
    return Unneeded(leftovers=found.leftovers, steps=candidates)


def collect(
    directory: CheckpointDirectory, *, keep_last: int, keep_every: int | None = None
) -> Sequence[str]:
    """Delete leftovers, and published steps by the rule.

    Returns:
        What was deleted, relative to the directory.
    """
    found = unneeded(directory, keep_last=keep_last, keep_every=keep_every)
    return directory.storage.delete(found.leftovers, found.steps)
