"""Logs of calls that nobody made, for tests of what reads them."""

from __future__ import annotations

from seatrial.recovery.collectives.log import (
    HEADER_WORDS,
    OUTCOME,
    RECORD,
    RECORD_WORDS,
    UNDER_WAY,
    CallLog,
)


class WrittenLog(CallLog):
    """Writes records as `seatrial.recovery.collectives.calls` does, without torch."""

    def begin(self, t: float, group: int, call: int, sequence: int) -> int:
        number = self.next_number()
        offset = self._record(number) * 8
        RECORD.pack_into(self.ring, offset, t, sequence, group, call, UNDER_WAY, number)
        return number

    def tell(self, number: int, outcome: float) -> None:
        self.seconds[self._record(number) + OUTCOME] = outcome

    def _record(self, number: int) -> int:
        return HEADER_WORDS + number % self.capacity * RECORD_WORDS
