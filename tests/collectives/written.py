"""Logs of calls that nobody made, for tests of what reads them."""

from __future__ import annotations

from seatrial.recovery.collectives.log import (
    HEADER_WORDS,
    NUMBER,
    OUTCOME,
    RECORD_WORDS,
    SEQUENCE,
    UNDER_WAY,
    WHAT,
    CallLog,
    T,
)


class WrittenLog(CallLog):
    """Writes records as `seatrial.recovery.collectives.calls` does, without torch."""

    def begin(self, t: float, group: int, call: int, sequence: int) -> int:
        number = self.next_number()
        record = self._record(number)
        self.words[record + NUMBER] = 0
        self.seconds[record + T] = t
        self.words[record + SEQUENCE] = sequence
        self.words[record + WHAT] = group | call << 32
        self.seconds[record + OUTCOME] = UNDER_WAY
        self.words[record + NUMBER] = number
        return number

    def tell(self, number: int, outcome: float) -> None:
        self.seconds[self._record(number) + OUTCOME] = outcome

    def _record(self, number: int) -> int:
        return HEADER_WORDS + number % self.capacity * RECORD_WORDS
