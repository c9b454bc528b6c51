"""Training data as records with a digest each, in one file: what is damaged is refused or skipped.

Guarantees: no byte of a record is used that does not have the digest it was written with; which
records are skipped depends on the file alone, so a resumed run skips the same ones. Every read is
the event ``data/record``, where faults may strike.

Does not: repair, compress or cache. One process writes a file, any number read it. Torch-free.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from seatrial.recovery.digest import digest
from seatrial.recovery.errors import DamagedRecordError
from seatrial.recovery.probe import probe

POLICIES = ("stop", "skip")
"""What becomes of a damaged record: an error that names it, or nothing in its place."""


def write_records(path: Path, records: Iterable[bytes]) -> None:
    """Write ``path`` and its index, ``path`` with ``.json`` added; both are replaced at once."""
    ends, digests, end = [], [], 0
    partial, index = path.with_name(f"{path.name}.partial"), index_of(path)
    with partial.open("wb") as file:
        for record in records:
            file.write(record)
            end += len(record)
            ends.append(end)
            digests.append(digest(record))
    aside = index.with_name(f"{index.name}.partial")
    aside.write_text(json.dumps({"ends": ends, "digests": digests}))
    partial.replace(path)
    aside.replace(index)


def index_of(path: Path) -> Path:
    """Where the index of a file of records is."""
    return path.with_name(f"{path.name}.json")


class RecordFile:
    """Reads what `write_records` wrote. ``damaged`` is one of `POLICIES`.

    Raises:
        ValueError: another policy.
        DamagedRecordError: the index cannot be read.
    """

    def __init__(self, path: Path | str, *, damaged: str = "stop") -> None:
        if damaged not in POLICIES:
            raise ValueError(f"damaged={damaged!r}: choose one of {', '.join(POLICIES)}")
        self._path = Path(path)
        self._skips = damaged == "skip"
        try:
            index = json.loads(index_of(self._path).read_text())
            self._ends, self._digests = list(map(int, index["ends"])), list(index["digests"])
            if len(self._ends) != len(self._digests):
                raise ValueError(f"{len(self._ends)} ends and {len(self._digests)} digests")
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedRecordError(
                f"the records of {self._path} cannot be read: {error}; write them again"
            ) from error

    def __len__(self) -> int:
        return len(self._ends)

    def close(self) -> None:
        """Read no more."""
        os.close(self._file)

    def read(self, number: int) -> bytes | None:
        """The record, from 0; None if it is damaged and skipped.

        Raises:
            DamagedRecordError: it is missing or does not have its digest, and the policy is stop.
            IndexError: there is no such record.
        """
        if not 0 <= number < len(self):
            raise IndexError(f"{self._path} has {len(self)} records, and no record {number}")
        begin, end = self._ends[number - 1] if number else 0, self._ends[number]
        data = bytearray(os.pread(self._file, end - begin, begin))
        probe("data/record", "before", record=number, data=data)
        is_whole = len(data) == end - begin and digest(data) == self._digests[number]
        if not is_whole and not self._skips:
            raise DamagedRecordError(
                f"record {number} of {self._path} (bytes {begin} to {end}) does not have its "
                "digest; restore the file, or read it with damaged='skip'"
            )
        probe("data/record", "after", record=number)
        return bytes(data) if is_whole else None
