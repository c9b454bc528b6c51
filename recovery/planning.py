"""Who writes what in a save: one message from each rank, one answer for all.

Guarantees: all ranks save the same step, or none writes anything; every distinct part of every
tensor is written by exactly one rank. A layout is sent and decided anew only when it changed on
some rank: otherwise the messages are a few dozen bytes. A rank that failed sends its own again.

Does not: touch the file system. Called by `seatrial.recovery.saving`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .agreement import agree
from .errors import SaveError
from .exchange import Exchange, Round
from .layout import Part, Region, assign, decode_layout, encode_layout

__all__ = ["Assignment", "Planner"]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What this rank writes; on the coordinator, ``regions`` has what every rank writes."""

    attempt: str
    parts: Sequence[Part]
    regions: Sequence[Sequence[Region]]


class Planner:
    """Remembers the layouts of one exchange's ranks from save to save."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._acknowledged: str | None = None
        self._chosen: list[int] = []
        # The coordinator's side: each rank's layout and its digest, and the indices it writes.
        self._layouts: dict[int, tuple[str, list[Region]]] = {}
        self._indices: list[list[int]] = []

    def forget(self) -> None:
        """Send this rank's layout again in the next save."""
        self._acknowledged = None

    def plan(
        self,
        round_: Round,
        step: int,
        capture: Callable[[], Sequence[Part]],
        begin_attempt: Callable[[], str],
    ) -> Assignment:
        """``capture`` runs on every rank, ``begin_attempt`` on the coordinator if all succeeded.

        Raises:
            RanksFailed: on all ranks.
        """
        parts: Sequence[Part] = ()
        layout_digest = ""

        def describe() -> object:
            nonlocal parts, layout_digest
            parts = capture()
            layout, layout_digest = encode_layout(parts)
            changed = layout_digest != self._acknowledged
            return [step, layout_digest, layout.decode() if changed else None]

        def decide(messages: list[object]) -> object:
            changed = self._take_layouts(messages)
            return [begin_attempt(), self._indices if changed else None]

        answer = agree(round_, "plan", self._exchange.rank, describe, decide)
        assert isinstance(answer, list)
        attempt, indices = answer
        if indices is not None:
            self._chosen = indices[self._exchange.rank]
        self._acknowledged = layout_digest
        return Assignment(
            attempt=attempt,
            parts=[parts[index] for index in self._chosen],
            regions=[
                [self._layouts[rank][1][index] for index in chosen]
                for rank, chosen in enumerate(self._indices)
            ],
        )

    def _take_layouts(self, messages: list[object]) -> bool:
        """Whether some rank's layout is new; the assignment is then made anew."""
        changed = False
        steps = {}
        for rank, message in enumerate(messages):
            assert isinstance(message, list)
            steps[rank], layout_digest, layout = message
            if layout is not None:
                changed = True
                self._layouts[rank] = (layout_digest, decode_layout(layout))
            elif self._layouts.get(rank, ("", []))[0] != layout_digest:
                raise SaveError(f"rank {rank} did not send its layout; save again")
        if len(set(steps.values())) != 1:
            raise SaveError(f"the ranks save different steps: {steps} by rank")
        if changed:
            self._indices = assign([self._layouts[rank][1] for rank in range(len(messages))])
        return changed
