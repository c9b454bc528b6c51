"""The one seam between checkpoint code and whoever watches it.

Guarantees: every point worth striking is announced by name, before and after, in the thread that
does the work; with no listener an announcement costs one truth test. An exception raised by a
listener propagates to the caller, which is how an injected failure arrives.

Does not: interpret names, keep history, or know of faults (`seatrial.chaos` listens). A point whose
body raises announces no ``after``.

Anyone may call `around`; only one process-wide set of listeners exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Edge = Literal["before", "after"]
Listener = Callable[[str, Edge, dict[str, object]], None]

_listeners: list[Listener] = []


def listen(listener: Listener) -> Callable[[], None]:
    """Call ``listener(event, edge, facts)`` at every announcement; returns how to stop it."""
    _listeners.append(listener)

    def stop() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return stop


def probe(event: str, edge: Edge, /, **facts: object) -> None:
    """Announce one edge of ``event``. Facts are JSON-encodable and describe the point.

    But for ``data``, a `bytearray` with what is in hand, which a listener may change.
    """
    if _listeners:
        for listener in tuple(_listeners):
            listener(event, edge, facts)


@contextmanager
def around(event: str, /, **facts: object) -> Iterator[None]:
    """Announce ``event`` before the body and, if it succeeds, after it."""
    probe(event, "before", **facts)
    yield
    probe(event, "after", **facts)
