"""The log of one rank's calls: a ring of records in a mapped file that survives SIGKILL.

Guarantees: a record is written before its call is handed to the backend, so the newest record of a
killed rank names the call it died in; names of groups and of calls are appended as lines of JSON
before the first record that uses them. The ring keeps the newest calls, and the file never grows
but by names. A record is some dozens of bytes and costs about a microsecond.

Does not: survive a power cut. Reading is torch-free and may happen while the rank runs or after.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"calls02\n"
# Time, sequence number in its group, group, call, how it went, and last, so that a record that a
# kill cut short is not taken for the newest, the number of the call from 1.
_RECORD = struct.Struct("<dQIIdQ")
# The words of a record that are written apart: a few dozen nanoseconds each.
_OUTCOME, _NUMBER = 3, 4

UNDER_WAY, DONE, WAITED_FOR = range(3)
_STATES = ("under way", "done", "waited for")
# How it went, where that is no time in seconds.
_OUTCOMES = {-1.0: UNDER_WAY, -2.0: WAITED_FOR}
_IS_UNDER_WAY, IS_WAITED_FOR = _OUTCOMES


class CallLog:
    """Writes to ``path``, which is made anew.

    ``begin(t, group, call, sequence)`` writes one call of the time ``t`` down and returns its
    number; ``tell(number, outcome)`` writes down after how many seconds it was seen to be done, or
    `IS_WAITED_FOR`.
    """

    def __init__(self, path: Path, *, capacity: int = 1024) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        size = _HEADER.size + capacity * _RECORD.size
        os.truncate(self._file, size)
        self._map = mmap.mmap(self._file, size)
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, capacity, size)
        os.lseek(self._file, 0, os.SEEK_END)
        self._words = memoryview(self._map).cast("Q")
        self._outcomes = memoryview(self._map).cast("d")
        self.begin, self.tell = _writers(self._map, self._words, self._outcomes, capacity)

    def name(self, kind: str, index: int, /, **facts: object) -> None:
        """Say what ``index`` stands for among groups or calls."""
        line = json.dumps({"kind": kind, "index": index, **facts}, separators=(",", ":"))
        os.write(self._file, line.encode() + b"\n")

    def close(self) -> None:
        self._words.release()
        self._outcomes.release()
        self._map.close()
        os.close(self._file)


def _writers(
    ring: mmap.mmap, words: memoryview[int], outcomes: memoryview[float], capacity: int
) -> tuple[Callable[[float, int, int, int], int], Callable[[int, float], None]]:
    """Two functions that know what a method would have to look up: half of what it would take."""
    pack, next_number = _RECORD.pack_into, itertools.count(1).__next__
    header, size = _HEADER.size, _RECORD.size
    header_words, record_words = header // 8, size // 8

    def begin(t: float, group: int, call: int, sequence: int) -> int:
        number = next_number()
        slot = header + number % capacity * size
        pack(ring, slot, t, sequence, group, call, _IS_UNDER_WAY, number)
        return number

    def tell(number: int, outcome: float) -> None:
        record = header_words + number % capacity * record_words
        if words[record + _NUMBER] == number:  # else a newer call has taken its place
            outcomes[record + _OUTCOME] = outcome

    return begin, tell


@dataclass(frozen=True, kw_only=True)
class LoggedCall:
    """One call of a rank. ``number`` counts all its calls, ``sequence`` those in the group, from 1.

    ``group`` is the group's description, ``group_name`` what torch calls it, ``ranks`` its global
    ranks. ``t`` is ``CLOCK_MONOTONIC``
    seconds; ``seconds`` is None while nobody has waited for it to be done. ``peer`` is the other
    rank of a point-to-point call.
    """

    number: int
    t: float
    sequence: int
    group: str
    ranks: tuple[int, ...]
    operation: str
    shapes: str
    size_bytes: int
    site: str
    state: int
    seconds: float | None
    peer: int | None
    group_name: str = ""

    @property
    def is_waited_for(self) -> bool:
        """Whether somebody was seen to wait for it, and not to be done with that."""
        return self.state == WAITED_FOR

    @property
    def waits(self) -> bool:
        """Whether it had begun, and was not seen to be done."""
        return self.state != DONE

    @property
    def where(self) -> tuple[str, tuple[int, ...]]:
        """The group that it was made in, on every rank alike."""
        return self.group_name or self.group, self.ranks

    def __str__(self) -> str:
        return (
            f"{self.operation} #{self.sequence} of group {self.group} ({self.shapes}) at "
            f"{self.site}, {_STATES[self.state]}"
        )


def read_calls(path: Path) -> list[LoggedCall]:
    """The newest calls of a log, oldest first; an absent file or one cut short has none."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    if len(data) < _HEADER.size:
        return []
    magic, capacity, size = _HEADER.unpack_from(data)
    if magic != _MAGIC or len(data) < size:
        return []
    names: dict[tuple[str, int], Any] = {}
    text = data[size:]
    for line in text[: text.rfind(b"\n") + 1].splitlines():
        fact = json.loads(line)
        names[fact["kind"], fact["index"]] = fact
    records = (_RECORD.unpack_from(data, _HEADER.size + n * _RECORD.size) for n in range(capacity))
    made = sorted((record for record in records if record[-1]), key=itemgetter(-1))
    return [_logged(record, names) for record in made]


def _logged(record: tuple[Any, ...], names: dict[tuple[str, int], Any]) -> LoggedCall:
    t, sequence, group_index, call_index, outcome, number = record
    state = _OUTCOMES.get(outcome, DONE)
    group, call = names.get(("group", group_index), {}), names.get(("call", call_index), {})
    return LoggedCall(
        number=number,
        t=t,
        sequence=sequence,
        group=group.get("name", "?"),
        ranks=tuple(group.get("ranks", ())),
        operation=call.get("operation", "?"),
        shapes=call.get("shapes", "?"),
        size_bytes=call.get("size_bytes", 0),
        site=call.get("site", "?"),
        state=state,
        seconds=outcome if state == DONE else None,
        peer=call.get("peer"),
        group_name=group.get("torch", ""),
    )
