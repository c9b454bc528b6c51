"""The names inside a store of checkpoints, the same on every backend.

    step-00000010/manifest.json                           the commit
    step-00000010/attempt-<id>/rank-00000.safetensors     tensors that rank 0 stored
    step-00000010/attempt-<id>/rank-00000.json            plain data of rank 0
    step-00000010/attempt-<id>/begun.json                 an attempt is under way (objects only)
    step-00000010/verified.json                           a restore, or `verify`, found it whole
    quarantine/step-00000010-<n>/, .../step-…-<n>.json     damaged, and why; never resumed from
    .trash-<id>/                                          about to be deleted (files only)
    .aside-step-00000010-<id>/                            the same, if no manifest came meanwhile

Does not: touch storage. Torch-free; called by the storages.
"""

from __future__ import annotations

import json
import re
import secrets

__all__ = ["attempt_name", "quarantine_note", "step_name", "step_of"]

MANIFEST = "manifest.json"
VERIFIED = "verified.json"
BEGUN = "begun.json"
QUARANTINE = "quarantine"
TRASH_PREFIX = ".trash-"
ASIDE_PREFIX = ".aside-"
PROBE_PREFIX = ".probe."
ATTEMPT_PREFIX = "attempt-"
NOTE_BYTES_MAX = 4096

_STEP = re.compile(r"step-([0-9]{8,})")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step that ``name`` is of; None for another spelling of the number (more zeros)."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def attempt_name(generation: int = 0) -> str:
    """A name that no other attempt has; see `storage.generations` for the number."""
    token = secrets.token_hex(8)
    return f"{ATTEMPT_PREFIX}{generation}_{token}" if generation else f"{ATTEMPT_PREFIX}{token}"


def quarantine_note(step: int, reason: str) -> bytes:
    """What is written beside a checkpoint in quarantine."""
    return (json.dumps({"step": step, "reason": reason}, indent=1) + "\n").encode()
