"""Which faults have struck: one file per strike, made exclusively, read by the supervisor.

Guarantees: a claim succeeds in exactly one process, so a fault that struck in one attempt does not
strike again in the next, and two ranks that reach a shared fault together strike each target once.
The file is complete before the strike, so a SIGKILL cannot lose it.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from secrets import token_hex


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One fault that struck one rank. ``t`` is in ``CLOCK_MONOTONIC`` seconds."""

    fault: int
    action: str
    rank: int
    attempt: int
    event: str
    edge: str
    step: int | None
    t: float
    grace: float | None = None
    resume: float | None = None


class Ledger:
    """The strikes of one run, in a directory shared by its ranks and its supervisor."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def claim(self, strike: Strike, *, persistent: bool) -> bool:
        """Record the strike; False if this fault has already struck this rank.

        A persistent fault may strike once in every attempt.
        """
        turn = f"-attempt{strike.attempt}" if persistent else ""
        path = self._directory / f"fault{strike.fault}-rank{strike.rank}{turn}.json"
        # Written aside and linked, so that a reader never sees half a record.
        aside = self._directory / f".{token_hex(8)}"
        aside.write_text(json.dumps(asdict(strike)))
        try:
            os.link(aside, path)
        except FileExistsError:
            return False
        finally:
            aside.unlink()
        return True

    def has_struck(self, fault: int, rank: int) -> bool:
        """Whether a transient fault has already struck this rank in any attempt."""
        return (self._directory / f"fault{fault}-rank{rank}.json").exists()

    def strikes(self) -> list[Strike]:
        """All strikes so far, oldest first."""
        found = [
            Strike(**json.loads(path.read_text())) for path in self._directory.glob("fault*.json")
        ]
        return sorted(found, key=lambda strike: strike.t)

    @staticmethod
    def now() -> float:
        """The clock of all strikes and traces, in seconds."""
        return time.monotonic()
