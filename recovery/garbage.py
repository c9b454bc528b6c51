"""Python's garbage collector, held back while very many small objects are made.

A manifest of thousands of tensors is tens of thousands of objects. The collector takes them for a
reason to look through everything that the process holds, torch included, again and again: a third
of the time of restoring 10,000 tensors. None of them is in a cycle, so nothing piles up meanwhile.

Guarantees: the collector runs again, if it did before, once no thread is inside.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collection_paused"]

_lock = threading.Lock()
_inside = 0
_was_on = False


@contextmanager
def collection_paused() -> Iterator[None]:
    """Hold collections back inside; several threads may be, and calls may nest."""
    global _inside, _was_on
    with _lock:
        if not _inside:
            _was_on = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _was_on:
                gc.enable()
