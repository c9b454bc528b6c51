"""The one seam between checkpoint code and whoever watches it.

Guarantees: every point worth striking is announced by name, before and after, in the thread that
does the work; with no listener an announcement costs one truth test. An exception raised by a
listener propagates to the caller, which is how an injected failure arrives.

An operation of the storage goes through `perform`, which hands it to whoever was set by
`interpose`: that one may announce it, alter what it moves, or not carry it out. With nobody there
it costs one truth test and a call.

Does not: interpret names, keep history, or know of faults (`seatrial.chaos` listens). A point whose
body raises announces no ``after``.

Anyone may call `around` and `perform`; only one process-wide set of listeners exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeVar

Edge = Literal["before", "after"]
Listener = Callable[[str, Edge, dict[str, object]], None]

_T = TypeVar("_T")
_listeners: list[Listener] = []


class Performer(Protocol):
    """Who carries out operations of the storage; see `perform`."""

    def perform(
        self, event: str, do: Callable[[Any], Any], data: Any, lost: Any, facts: dict[str, object]
    ) -> Any: ...


_performers: list[Performer] = []


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


def interpose(performer: Performer) -> Callable[[], None]:
    """Let ``performer`` carry out every operation from now on; returns how to stop it.

    The last one that was set is asked, and nobody else.
    """
    _performers.append(performer)

    def stop() -> None:
        if performer in _performers:
            _performers.remove(performer)

    return stop


def performer() -> Performer | None:
    """Who carries out operations, for a storage that does not call `perform`."""
    return _performers[-1] if _performers else None


def perform(
    event: str, do: Callable[[Any], _T], data: Any = None, /, *, lost: Any = None, **facts: object
) -> _T:
    """Carry out one operation of the storage: ``do(data)``, unless somebody interposes.

    Args:
        event: its name, such as ``storage/write``.
        do: carries it out. Called at most once, with what is to be written instead of ``data``;
            perhaps later, if the operation is a write, a publication, a renaming or a deletion.
        data: the bytes to write, or a buffer that ``do`` fills.
        lost: what to return if it is acknowledged without being carried out.
        facts: ``file`` in full; ``offset`` of a write into an open file; ``names`` of what one
            request deletes, relative to ``file``.
    """
    if not _performers:
        return do(data)
    result: _T = _performers[-1].perform(event, do, data, lost, facts)
    return result
