"""What was observed of one place for checkpoints, as a value, as JSON and as a table.

Guarantees: a certificate calls a place safe only if every guarantee that a manifest-gated
checkpoint needs was tried and kept; what was not tried is said, and never counts as kept.

Does not: prove. Races and reads that went well are observations of one hour. Torch-free.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from importlib import metadata
from pathlib import Path

__all__ = ["Certificate", "Observation", "Outcome"]

_PACKAGES = ("seatrial", "fsspec", "s3fs", "aiobotocore")


class Outcome(StrEnum):
    """How one guarantee was found."""

    KEPT = "kept"
    BROKEN = "broken"
    NOT_OFFERED = "not offered"
    NOT_TRIED = "not tried"


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One guarantee: whether it was kept, and what was seen; ``needed`` by checkpoints or not."""

    guarantee: str
    needed: bool
    outcome: Outcome
    evidence: str
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_fatal(self) -> bool:
        """Whether checkpoints are not safe because of it."""
        return self.needed and self.outcome is not Outcome.KEPT


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What ``url`` was observed to guarantee."""

    url: str
    observations: Sequence[Observation]
    notes: Sequence[str] = ()
    made: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def is_safe(self) -> bool:
        """Whether manifest-gated checkpoints are safe there, as far as was observed."""
        return bool(self.observations) and not any(each.is_fatal for each in self.observations)

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.is_safe:
            return f"SAFE: every guarantee that checkpoints need was observed at {self.url}"
        fatal = [each for each in self.observations if each.is_fatal]
        reasons = "; ".join(f"{each.guarantee}: {each.evidence}" for each in fatal)
        return f"NOT SAFE: {reasons or 'nothing was tried'}"

    def observed(self, guarantee: str) -> Observation:
        """The observation of one guarantee; raises `KeyError`."""
        for each in self.observations:
            if each.guarantee == guarantee:
                return each
        raise KeyError(guarantee)

    def to_json(self) -> str:
        versions = {name: _version(name) for name in _PACKAGES}
        return json.dumps(
            {
                "url": self.url,
                "made": self.made,
                "safe": self.is_safe,
                "verdict": self.verdict,
                "notes": list(self.notes),
                "observations": [asdict(each) for each in self.observations],
                "client": {
                    "python": platform.python_version(),
                    "kernel": platform.release(),
                    **{name: version for name, version in versions.items() if version},
                },
            },
            indent=1,
        )

    def save(self, path: Path) -> None:
        """Write the JSON to ``path``."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json() + "\n")

    def table(self) -> list[str]:
        """The observations as lines of text, then the verdict."""
        width = max((len(each.guarantee) for each in self.observations), default=0)
        lines = [
            f"{each.guarantee:<{width}}  {each.outcome:<11}  {'needed' if each.needed else '':<6}  "
            f"{each.evidence}"
            for each in self.observations
        ]
        return [*lines, *(f"note: {note}" for note in self.notes), self.verdict]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
