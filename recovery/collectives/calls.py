"""The one way that every call takes: it is taken down, logged, and handed to the backend.

Guarantees: the newest record of a log is that of the newest call, and was written before the
backend had it. Costs some microseconds, most of them because the processor has slept in the wait
for the call before: what is run then is not in its caches. So `override` makes one function that
calls few others, and binds what it would have to look up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import get_ident
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import ProcessGroup, Work

from .callsite import CallSite, call_site, hidden_files, known_sites
from .journal import KEPT
from .log import HEADER_WORDS, RECORD, RECORD_WORDS, UNDER_WAY
from .operations import Operation, first_tensors
from .works import MeteredWork, TimedWork

if TYPE_CHECKING:
    from .group import ObservedGroup

_SITE = "seatrial_site"
"""The argument by which a call that was attended to says where it comes from."""


@dataclass
class Call:
    """A call that waits to be made: by which method of which group, from where."""

    group: ObservedGroup
    operation: Operation
    method: str
    arguments: Sequence[Any]
    named: dict[str, Any]
    site: CallSite

    def issue(self) -> Work:
        """Make it, and take it down like any other."""
        named = self.named | {_SITE: self.site}
        work: Work = getattr(self.group, self.method)(*self.arguments, **named)
        return work


def override(operation: Operation, method: str) -> Callable[..., Work]:
    """The ``method`` of an observed group, which is one of ``operation``."""
    native: Callable[..., Work] = getattr(ProcessGroup, method)
    compared_of, terms_of = operation.compared, operation.terms
    reduces_by = operation.options if operation.has_reduction and not operation.has_root else 0
    is_message, takes_first = operation.is_point_to_point, operation.compared is first_tensors
    getframe, is_hidden, site_at = sys._getframe, hidden_files.get, known_sites.get
    pack = RECORD.pack_into

    def call(self: ObservedGroup, *arguments: Any, **named: Any) -> Work:
        observer = self.observer
        site = named.pop(_SITE, None) if named else None
        if site is None:
            if observer.attends:
                made = Call(self, operation, method, arguments, named, call_site(2))
                return observer.attend(made)
            # As `call_site` finds places that it has seen.
            frame: FrameType | None = getframe(1)
            while frame is not None and is_hidden(frame.f_code.co_filename):
                frame = frame.f_back
            site = (frame and site_at((id(frame.f_code), frame.f_lasti))) or call_site(2)

        given = (*arguments, *named.values()) if named else arguments
        compared = given[0] if takes_first and type(given[0]) is list else compared_of(given)
        try:
            terms = hash(given[reduces_by].reduceOp) if reduces_by else terms_of(given)
        except (AttributeError, IndexError):
            terms = terms_of(given)
        key: object
        if len(compared) == 1:
            tensor = compared[0]
            key = site, terms, tensor.shape, tensor.dtype, operation
        else:
            key = site, terms, *((each.shape, each.dtype) for each in compared), operation
        signature = self.signatures.get(key)
        if signature is None:
            signature = self.signatures[key] = self.describe(operation, given, site)

        stream = self.between(operation, given) if is_message else self.collectives
        if len(stream.recent) >= KEPT:
            stream.fold()
        stream.recent.append(signature)
        stream.thread = get_ident()
        stream.count = sequence = stream.count + 1

        log = observer.log
        if log is None:
            return native(self.unobserved, *arguments, **named)
        number, began = log.next_number(), monotonic()
        record = HEADER_WORDS + number % log.capacity * RECORD_WORDS
        pack(log.ring, record * 8, began, sequence, self.index, signature.index, UNDER_WAY, number)
        work = native(self.unobserved, *arguments, **named)
        if not self.is_timed:
            return work
        handle = TimedWork() if observer.meter is None else MeteredWork.of(observer.meter)
        handle.inner = work
        handle.words, handle.seconds = log.words, log.seconds
        handle.number, handle.record = number, record
        handle.began = began
        return handle

    call.__name__ = method
    return call
