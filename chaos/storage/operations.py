"""Carrying out operations of the storage, with the faults that wait for them.

Guarantees: operations are counted for each kind, in the process that performs them; one that no
fault waits for is carried out at once, unaltered and untraced. What ``late`` holds back is carried
out after the given number of others, at the latest when `Operations.close` is called; a kill loses
it.

Several threads may perform operations. Torch-free; set up by `seatrial.chaos.storage.arming`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from ..actions import INSIDE
from ..fault import Fault
from ..inject import Injector
from .alteration import Alteration, Key, step_of_own_content, version_key

__all__ = ["Operations"]

_LAST_S = 30.0  # for what was held back, at the very end


@dataclass
class _Held:
    """An operation that is carried out later, after ``left`` others."""

    do: Callable[[], object]
    file: str
    left: int


class Operations:
    """The storage operations of one rank in one attempt; see `seatrial.recovery.probe.perform`."""

    def __init__(self, injector: Injector, *, on_disk: Callable[[str], bool] | None = None) -> None:
        """``on_disk`` says of a file whether the disk that it is on sees its operations itself."""
        self._on_disk = on_disk
        self.counts: Counter[str] = Counter()
        """How many operations of each kind were begun."""
        self._injector = injector
        self._waiting: dict[str, list[Fault]] = {}
        self._held: list[_Held] = []
        self._futures: list[tuple[Future[Any], _Held]] = []
        self._lock = threading.Lock()
        self._seen: dict[Key, Any] = {}

    def perform(
        self, event: str, do: Callable[[Any], Any], data: Any, lost: Any, facts: dict[str, object]
    ) -> Any:
        """Carry out ``do(data)`` as `seatrial.recovery.probe.perform` says."""
        operation = self.begin(event, data, facts)
        if operation is None:
            return do(data)
        self.wait(operation.wait_s)
        if operation.hold:
            self.hold(operation, self.later(operation, do))
            result = lost
        else:
            result = lost if operation.is_lost else do(operation.content)
        try:
            result = operation.answer(result)
        finally:
            self.done(operation)
        self.wait(operation.wait_s)
        operation.changes_at_rest(possible=False)
        operation.end()
        return result

    # What another place of the same storage does differently

    def wait(self, seconds: float) -> None:
        """Let the operation take that much longer."""
        if seconds:
            time.sleep(seconds)

    def later(self, operation: Alteration, do: Callable[[Any], Any]) -> Callable[[], object]:
        """``do`` with what it needs, which its caller may have closed by then."""
        if isinstance(operation.offset, int):
            return partial(_write_at, operation.file, operation.content, operation.offset)
        return partial(do, operation.content)

    def done(self, operation: Alteration) -> None:
        """It has been carried out and answered, as the faults would have it."""

    def takes(self, fault: Fault, file: str) -> bool:
        """Whether ``fault`` is to strike here, at an operation on ``file``."""
        return self._on_disk is None or fault.action in INSIDE or not self._on_disk(file)

    def step_of_content(self, event: str, file: str) -> int | None:
        """The step of the checkpoint of which ``file`` is a part."""
        return step_of_own_content(event, file)

    def begin(self, event: str, data: Any, facts: dict[str, object]) -> Alteration | None:
        """Count the operation; how faults alter it, or None if none waits for it.

        Raises:
            OSError: it is refused.
        """
        with self._lock:
            self.counts[event] += 1
        waiting = self._waiting_for(event)
        if self._held:
            self._carry_out_held()
        if not waiting:
            return None
        file = str(facts["file"])
        waiting = [f for f in waiting if fnmatchcase(file, f.path) and self.takes(f, file)]
        if not waiting:
            return None
        is_remembered = any(fault.action == "stale" for fault in waiting)
        seen = self._seen if is_remembered else None
        operation = Alteration(
            self._injector, event, data, facts, seen, waiting, self.step_of_content
        )
        operation.begin()
        return operation

    def keeps_versions(self, file: str) -> bool:
        """Whether the content of ``file`` should be remembered before it is overwritten."""
        waiting = self._waiting_for("storage/read")
        return any(f.action == "stale" and fnmatchcase(file, f.path) for f in waiting)

    def waits(self, event: str, file: str) -> bool:
        """Whether a fault waits for the operation ``event`` on ``file``."""
        return any(fnmatchcase(file, fault.path) for fault in self._waiting_for(event))

    def _waiting_for(self, event: str) -> list[Fault]:
        waiting = self._waiting.get(event)
        if waiting is None:
            waiting = self._waiting[event] = self._injector.waiting(event)
        return waiting

    def remember(self, file: str, content: bytes) -> None:
        """Keep what ``file`` holds, to be served as stale."""
        self._seen[version_key(file)] = content

    def hold(self, operation: Alteration, do: Callable[[], object]) -> None:
        """Carry ``do`` out when the operation is due; it may return a future."""
        with self._lock:
            self._held.append(_Held(do, operation.file, operation.hold + 1))

    def close(self) -> None:
        """Carry out what is held back, and record how many operations there were."""
        self._carry_out_held(all_of_it=True)
        for future, held in self._futures:
            self._carry_out(held, partial(future.result, _LAST_S))
        self._futures.clear()
        self._injector.trace.record("operations", counts=dict(self.counts))

    def _carry_out_held(self, *, all_of_it: bool = False) -> None:
        with self._lock:
            for held in self._held:
                held.left -= 1
            due = [held for held in self._held if held.left <= 0 or all_of_it]
            self._held = [held for held in self._held if held not in due]
        for held in due:
            self._carry_out(held, held.do)

    def _carry_out(self, held: _Held, do: Callable[[], object]) -> None:
        try:
            result = do()
        except Exception as error:  # nobody waits for it any more
            said = f"could not be carried out late: {error}"
        else:
            if isinstance(result, Future):
                self._futures.append((result, held))
                return
            said = "carried out late"
        self._injector.trace.record("late", file=held.file, change=said)


def _write_at(file: str, content: bytes, offset: int) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        while content:
            done = os.pwrite(descriptor, content, offset)
            content, offset = content[done:], offset + done
    finally:
        os.close(descriptor)
