"""The same work on many items, by this thread and a few more.

Guarantees: when `run_all` returns, every item was worked on; when it raises, no thread works any
more, and what it raises is the first error of any thread. An error in a helper is never lost. No
thread outlives the call, and with one thread, or one item, none is started: a process that forks
between saves forks alone.

Does not: keep an order beyond handing items out in turn, retry, or announce events; whoever calls
does that, in its own thread. Torch-free; called by the writer and the reader.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

__all__ = ["reader_threads", "run_all", "writer_threads"]

THREADS_MAX = 4
_T = TypeVar("_T")


def writer_threads() -> int:
    """How many threads of this rank write: at least two, so that one digests while one waits."""
    return max(2, reader_threads())


def reader_threads(*, alone: bool = False) -> int:
    """How many threads of this rank read: its share of the processors, at most `THREADS_MAX`.

    More threads than processors only make the disk seek between them. ``alone`` is for a process
    that is no rank: all processors are its own.
    """
    try:
        ranks_here = 1 if alone else int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        ranks_here = THREADS_MAX
    return min(THREADS_MAX, max(1, _processors() // max(1, ranks_here)))


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_all(work: Callable[[_T], object], items: Sequence[_T], *, threads: int) -> None:
    """Call ``work`` on each item, in turn, by up to ``threads`` threads, this one included.

    Raises:
        BaseException: the first that ``work`` raised anywhere. Items that were not begun by then
            are left out.
    """
    crew = _Crew(work, items)
    helpers = [
        threading.Thread(target=crew.work_through, name=f"seatrial-worker-{number}", daemon=True)
        for number in range(min(threads, len(items)) - 1)
    ]
    try:
        for helper in helpers:
            try:
                helper.start()
            except RuntimeError:
                break  # No more threads are to be had; fewer do the same work.
        crew.work_through()
    except BaseException as error:  # an interrupt between two items
        crew.fail(error)
    finally:
        for helper in helpers:
            if helper.ident is not None:
                helper.join()
    if crew.error is not None:
        raise crew.error


class _Crew:
    def __init__(self, work: Callable[[_T], object], items: Iterable[_T]) -> None:
        self._work: Callable[[_T], object] = work
        self._items = iter(items)
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error

    def work_through(self) -> None:
        while True:
            with self._lock:
                try:
                    item = next(self._items)
                except StopIteration:
                    return
                if self.error is not None:
                    return
            try:
                self._work(item)
            except BaseException as error:
                self.fail(error)
                return
