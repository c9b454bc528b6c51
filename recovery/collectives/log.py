"""The log of one rank's calls: a ring of records in a mapped file that survives SIGKILL.

Guarantees: a record is written before its call is handed to the backend, so the newest record of a
killed rank names the call it died in; names of groups and of calls are appended as lines of JSON
before the first record that uses them. The ring keeps the newest calls, and the file never grows
but by names. A record is 40 bytes and costs about a microsecond.

Does not: survive a power cut. Reading is torch-free and may happen while the rank runs or after.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import struct
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"calls02\n"

RECORD = struct.Struct("<dQIIdQ")
"""Time, sequence number in its group, group, call, how it went, and last, so that a record that a
kill cut short is not taken for the newest, the number of the call from 1."""

HEADER_WORDS, RECORD_WORDS = _HEADER.size // 8, RECORD.size // 8
OUTCOME, NUMBER = 3, 4
"""The words of a record that are used apart."""

DONE = 0.0
UNDER_WAY, WAITED_FOR = -1.0, -2.0
"""How a call went, where it is no time in seconds; what is not below `DONE` is one."""

_STATES = {UNDER_WAY: "under way", WAITED_FOR: "waited for", DONE: "done"}


class CallLog:
    """Writes to ``path``, which is made anew.

    `calls` and `works` write the records themselves: a function here would take as long as all the
    rest. ``ring`` is the file, ``words`` and ``seconds`` the same as unsigned integers and as
    doubles: `HEADER_WORDS` and then `RECORD_WORDS` for each of ``capacity`` records.
    ``next_number`` gives the numbers of calls, which decide where their records are.
    """

    def __init__(self, path: Path, *, capacity: int = 1024) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        size = _HEADER.size + capacity * RECORD.size
        os.truncate(self._file, size)
        self.ring = mmap.mmap(self._file, size)
        self.ring[: _HEADER.size] = _HEADER.pack(_MAGIC, capacity, size)
        os.lseek(self._file, 0, os.SEEK_END)
        self.capacity = capacity
        self.words = memoryview(self.ring).cast("Q")
        self.seconds = memoryview(self.ring).cast("d")
        self.next_number = itertools.count(1).__next__

    def name(self, kind: str, index: int, /, **facts: object) -> None:
        """Say what ``index`` stands for among groups or calls."""
        line = json.dumps({"kind": kind, "index": index, **facts}, separators=(",", ":"))
        os.write(self._file, line.encode() + b"\n")

    def close(self) -> None:
        self.words.release()
        self.seconds.release()
        self.ring.close()
        os.close(self._file)


@dataclass(frozen=True, kw_only=True)
class LoggedCall:
    """One call of a rank. ``number`` counts all its calls, ``sequence`` those in the group, from 1.

    ``group`` is the group's description, ``group_name`` what torch calls it, ``ranks`` its global
    ranks. ``t`` is ``CLOCK_MONOTONIC`` seconds; ``state`` is one of `UNDER_WAY`, `WAITED_FOR` and
    `DONE`; ``seconds`` is None while nobody has waited for it to be done. ``peer`` is the other
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
    state: float
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
    records = (RECORD.unpack_from(data, _HEADER.size + n * RECORD.size) for n in range(capacity))
    made = sorted((record for record in records if record[-1]), key=itemgetter(-1))
    return [_logged(record, names) for record in made]


def _logged(record: tuple[Any, ...], names: dict[tuple[str, int], Any]) -> LoggedCall:
    t, sequence, group_index, call_index, outcome, number = record
    state = outcome if outcome in _STATES else DONE
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
