"""One operation of the storage that a fault waits for: what becomes of it, step by step.

Guarantees: whatever a fault does is in the trace, with the file and what was changed, or why it
could change nothing; a change to a checkpoint's own files is recorded as damage to its step.

Does not: carry anything out, or sleep; `seatrial.chaos.storage.operations` does, and the file
system of fsspec where that has to be awaited. Torch-free.
"""

from __future__ import annotations

import errno
import os
import random
import re
from collections.abc import Callable, Collection, Hashable
from functools import partial
from typing import Any

from ..actions import DATA, ERRORS
from ..events import STORAGE
from ..fault import Fault
from ..inject import Injector

__all__ = ["INJECTED", "Alteration", "step_of_file", "step_of_own_content"]

INJECTED = "injected by the fault '"
"""In the text of every error that a fault raises, before the fault."""

Key = tuple[Hashable, ...]

_STEP = re.compile(r"(?:^|/)step-(\d{8,})(?:/|$)")
# A manifest, also under the name that it is written under in a directory; shards and plain data.
_CONTENT = re.compile(
    r"/(?:manifest(?:-\d+)?\.json|\.manifest\.json\.\w+\.tmp|attempt-[^/]+/rank-[^/]+)$"
)


def step_of_file(file: str) -> int | None:
    """The step of the checkpoint that a file of this project's store belongs to."""
    found = _STEP.search(file)
    return int(found[1]) if found else None


def step_of_own_content(_event: str, file: str) -> int | None:
    """The step of the checkpoint of this project's store of which ``file`` is a part."""
    return step_of_file(file) if _CONTENT.search(file) else None


class Alteration:
    """One operation on ``file``; call `begin`, then carry out what is left, `answer` and `end`.

    Attributes:
        content: what is to be written, or the buffer to fill.
        facts: what is known of it, ``file`` at least.
        reported: the faults that have changed it.
        wait_s: how long to wait before it is carried out.
        is_lost: it is not to be carried out.
        hold: it is to be carried out after so many others, if it is not 0.
    """

    def __init__(
        self,
        injector: Injector,
        event: str,
        data: Any,
        facts: dict[str, object],
        seen: dict[Key, Any] | None,
        waiting: Collection[Fault],
        step_of_content: Callable[[str, str], int | None] | None = None,
    ) -> None:
        """``waiting`` are the faults that may alter it; ``seen`` is what the rank has seen, if one
        of them wants that. ``step_of_content(event, file)`` is the step of the checkpoint of which
        the file is a part; None where it is none.
        """
        self.event = event
        self.facts = facts
        self.reported: list[tuple[int, Fault]] = []
        self.file = str(facts["file"])
        self.offset = facts.get("offset")
        self.content = data
        self.wait_s = 0.0
        self.is_lost = False
        self.hold = 0
        self._at_rest: list[tuple[int, Fault]] = []
        self._injector = injector
        self._seen = seen
        self._waiting = waiting
        self._step_of_content = step_of_content or step_of_own_content
        self._step = step_of_file(self.file)
        self._reading: list[tuple[int, Fault]] = []

    def begin(self) -> None:
        """Let the faults strike that are due before the operation.

        Raises:
            OSError: the operation is refused.
        """
        for index, fault in self._due("before"):
            if fault.action == "fail":
                self._refuse(index, fault)
            elif self.event == f"{STORAGE}read" or fault.action == "stale":
                self._reading.append((index, fault))
            else:
                self._change(index, fault)

    def answer(self, result: Any) -> Any:
        """What the job is to see instead of ``result``; a buffer that was filled is changed."""
        self.wait_s = 0.0
        for index, fault in self._reading:
            result = self._misread(index, fault, result)
        if self._seen is not None and not any(f.action == "stale" for _, f in self._reading):
            read = bytes(self.content) if _is_buffer(self.content) else result
            self._seen[self._key] = read
        return result

    def changes_at_rest(self, *, possible: bool) -> list[Callable[[bytes], bytes]]:
        """What the content of the complete file is to be replaced by, where no bytes pass in the
        operation itself; nothing, and so it is recorded, if that is not ``possible``.
        """
        if possible:
            return [partial(self._altered, index, fault) for index, fault in self._at_rest]
        for index, fault in self._at_rest:
            self.report(index, fault, "no bytes pass in it", changed=False)
        return []

    def end(self) -> None:
        """Let the faults strike that are due after the operation.

        Raises:
            OSError: the operation took effect, and is reported as failed.
        """
        for index, fault in self._due("after"):
            self._refuse(index, fault)

    def report(
        self,
        index: int,
        fault: Fault,
        change: str,
        *,
        changed: bool = True,
        lasts_s: float | None = None,
    ) -> None:
        """Record what ``fault`` made of the operation, and how much longer it takes."""
        trace = self._injector.trace
        trace.record(
            "operation",
            fault=index,
            event=self.event,
            file=self.file,
            change=change,
            changed=changed,
            lasts_s=lasts_s,
        )
        if changed:
            self.reported.append((index, fault))
        step = self._step_of_content(self.event, self.file)
        lies = fault.action not in ("fail", "delay", "slow")
        if changed and lies and self.event.removeprefix(STORAGE) in DATA and step is not None:
            trace.record(
                "damage",
                fault=index,
                step=step,
                file=self.file,
                change=change,
                event=self.event,
            )

    # What becomes of it

    def _due(self, edge: str) -> list[tuple[int, Fault]]:
        return self._injector.due(self.event, edge, self.file, self._step, self._waiting)

    def _refuse(self, index: int, fault: Fault) -> None:
        number = ERRORS[fault.error]
        said = "503 SlowDown" if fault.error == "SlowDown" else os.strerror(number)
        self.report(index, fault, f"{'reported as ' * (fault.when == 'after')}{fault.error}")
        raise OSError(number, f"{said} (injected by the fault '{fault}')", self.file)

    def _change(self, index: int, fault: Fault) -> None:
        """A fault of an operation that writes, renames, deletes, …"""
        if fault.action == "delay":
            self._delay(index, fault)
        elif fault.action == "slow":
            self._slow(index, fault, self.content)
        elif fault.action == "lose":
            self.is_lost = True
            self.report(index, fault, "acknowledged and lost")
        elif fault.action == "late":
            self.hold = fault.hold
            self.content = bytes(self.content) if self.content is not None else None
            self.report(index, fault, f"carried out {fault.hold} operation(s) late")
        elif self.content is None:
            self._at_rest.append((index, fault))
        else:
            self.content = self._altered(index, fault, bytes(self.content))

    def _altered(self, index: int, fault: Fault, content: bytes) -> bytes:
        """``content`` as ``short`` or ``corrupt`` leaves it."""
        if fault.action == "short":
            keep = len(content) // 2 if fault.keep is None else min(fault.keep, len(content))
            change = f"{keep} of {len(content)} bytes written"
            self.report(index, fault, change, changed=keep < len(content))
            return content[:keep]
        if not content:
            self.report(index, fault, "there were no bytes", changed=False)
            return content
        position, bit = self._place(index, len(content))
        self.report(index, fault, f"bit {bit} of byte {position} flipped")
        changed = bytearray(content)
        changed[position] ^= 1 << bit
        return bytes(changed)

    def _place(self, index: int, length: int) -> tuple[int, int]:
        choice = random.Random(f"{self._injector.seed + index}/{self._injector.rank}")
        return choice.randrange(length), choice.randrange(8)

    def _delay(self, index: int, fault: Fault) -> None:
        seconds = self._injector.delay_s(index, fault)
        self.wait_s += seconds
        self.report(index, fault, f"{seconds:g} s late", lasts_s=seconds)

    def _slow(self, index: int, fault: Fault, moved: Any) -> None:
        length = memoryview(moved).nbytes if _is_bytes(moved) else 0
        lasts_s = length / fault.rate
        self.wait_s += lasts_s
        change = f"{length} bytes at {fault.rate:g} a second"
        self.report(index, fault, change, changed=length > 0, lasts_s=lasts_s)

    # What the job sees

    @property
    def _key(self) -> Key:
        length = len(self.content) if _is_buffer(self.content) else None
        return self.event, self.file, self.offset, length

    def _misread(self, index: int, fault: Fault, result: Any) -> Any:
        filled = self.content if _is_buffer(self.content) else None
        if fault.action == "slow":
            self._slow(index, fault, result if filled is None else filled)
        elif fault.action == "delay":
            self._delay(index, fault)
        elif fault.action == "stale":
            return self._stale(index, fault, result, filled)
        elif filled is not None:
            filled[:] = self._altered(index, fault, bytes(filled))
        elif _is_bytes(result):
            return self._altered(index, fault, bytes(result))
        else:
            self.report(index, fault, "no bytes pass in it", changed=False)
        return result

    def _stale(self, index: int, fault: Fault, result: Any, filled: memoryview | None) -> Any:
        now = bytes(filled) if filled is not None else result
        seen = self._seen or {}
        version = seen.get(version_key(self.file))
        if self._key in seen:
            before = seen[self._key]
        elif version is not None and isinstance(now, bytes):
            start = self.offset if isinstance(self.offset, int) else 0
            before = version[start : start + len(now)]
        elif isinstance(now, (list, dict, set, tuple)):
            before = type(now)()
        else:
            self.report(index, fault, "not there, though it is", changed=now is not False)
            if isinstance(now, bool):
                return False
            said = os.strerror(errno.ENOENT)
            raise FileNotFoundError(
                errno.ENOENT, f"{said} (injected by the fault '{fault}')", self.file
            )
        self.report(index, fault, "as it was before", changed=before != now)
        if filled is None:
            return before
        filled[:] = before
        return result


def version_key(file: str) -> Key:
    """Under which the content is remembered that a file had before it was overwritten."""
    return ("version", file)


def _is_buffer(data: Any) -> bool:
    return isinstance(data, memoryview) and not data.readonly


def _is_bytes(data: Any) -> bool:
    return isinstance(data, (bytes, bytearray, memoryview))
