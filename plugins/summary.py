"""The table that closes a chaos session: one row per trial."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .rows import Row

_HEADINGS = ("verdict", "attempts", "steps lost", "recovered in")
_NAME_WIDTH_MIN = 24


def summary_lines(rows: Sequence[Row], width: int) -> Iterator[tuple[Row | None, str]]:
    """``(row, line)`` for every line of the table; headings and totals belong to no row."""
    cells = [_cells(row) for row in rows]
    columns = [
        max(len(heading), *(len(line[index]) for line in cells))
        for index, heading in enumerate(_HEADINGS)
    ]
    room = max(_NAME_WIDTH_MIN, width - sum(columns) - 2 * len(columns))
    first = min(room, max(len("trial"), *(len(row.trial) for row in rows)))
    yield None, _line("trial", _HEADINGS, first, columns)
    for row, line in zip(rows, cells, strict=True):
        yield row, _line(_shorten(row.trial, first), line, first, columns)
    passed = sum(row.passed for row in rows)
    seconds = sum(row.total_s for row in rows)
    yield None, f"{passed} of {len(rows)} trials as expected, {seconds:.1f} s in trials"
    for note in dict.fromkeys(row.note for row in rows if row.note):
        yield None, f"note: {note}"


def _cells(row: Row) -> tuple[str, ...]:
    recovery = "-" if row.recovery_s is None else f"{row.recovery_s:.2f} s"
    return row.verdict, str(row.attempts), str(row.steps_lost), recovery


def _line(name: str, cells: Sequence[str], first: int, columns: Sequence[int]) -> str:
    verdict, *numbers = cells
    text = f"{name:<{first}}  {verdict:<{columns[0]}}"
    for number, column in zip(numbers, columns[1:], strict=True):
        text += f"  {number:>{column}}"
    return text


def _shorten(text: str, width: int) -> str:
    """Cut out the middle: names of trials differ at both ends."""
    if len(text) <= width:
        return text
    head = width // 4
    return f"{text[:head]}…{text[head + 1 - width :]}"
