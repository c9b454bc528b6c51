"""Trying again, the same way on every backend: transient errors only, for a bounded time.

What is transient is one table, by errno; object stores translate their answers into it (see
`seatrial.recovery.storage.s3_errors`). Everything else is permanent and raised at once: no
permission, no space, no such bucket, a read-only file system, a file that is missing.

| errno | stands for |
|---|---|
| EIO | a disk or a server that could not read this time |
| EAGAIN, EBUSY, EINTR | asked to come back later (503, 429, SlowDown), or a conflict (409) |
| ETIMEDOUT | no answer in time |
| ECONNRESET, ECONNABORTED, ECONNREFUSED, EPIPE, ENOTCONN | a connection that broke or was refused |
| ENETDOWN, ENETUNREACH, ENETRESET, EHOSTDOWN, EHOSTUNREACH | a network that is away |
| EREMOTEIO | the server failed (500, 502, 504), or bytes changed on their way |
| ESTALE | a file handle that NFS has to look up again |
| EMFILE, ENFILE, ENOBUFS, ENOMEM | out of descriptors or memory, at this moment |

Guarantees: no new try begins later than ``total_s`` after the first; waits grow exponentially and
are random, so that many ranks do not come back at once; when it gives up, the error says how often
and for how long it was tried, keeps its errno, and is not tried again further up.

Does not: interrupt a try; a request has a timeout of its own. Torch-free; called by the storages
and by whoever reads files.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import RetryError, Retrying, retry_if_exception, wait_random_exponential
from tenacity.stop import stop_before_delay

__all__ = ["LOCAL", "REMOTE", "RetryPolicy", "StillFailingError", "is_transient", "retried"]

_T = TypeVar("_T")

TRANSIENT = frozenset(
    {
        errno.EIO,
        errno.EAGAIN,
        errno.EBUSY,
        errno.EINTR,
        errno.ETIMEDOUT,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.EPIPE,
        errno.ENOTCONN,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENETRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EREMOTEIO,
        errno.ESTALE,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOMEM,
    }
)


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How long to go on, and the bounds of the random wait between two tries, in seconds."""

    total_s: float
    wait_first_s: float
    wait_max_s: float


LOCAL = RetryPolicy(total_s=0.5, wait_first_s=0.02, wait_max_s=0.2)
"""A disk that fails for longer will not mend itself; many files may have to be tried."""

REMOTE = RetryPolicy(total_s=60, wait_first_s=0.1, wait_max_s=5)
"""Long enough for a store that asks to slow down or for a server that is started anew."""


class StillFailingError(OSError):
    """A transient error that did not go away; ``errno`` is that of the last try."""


def is_transient(error: BaseException) -> bool:
    """Whether another try may succeed."""
    if not isinstance(error, OSError) or isinstance(error, StillFailingError):
        return False
    if error.errno is None:  # raised by a library
        return isinstance(error, (ConnectionError, TimeoutError))
    return error.errno in TRANSIENT


def retried(use: Callable[[], _T], policy: RetryPolicy) -> _T:
    """What ``use`` returns, called again after a transient error.

    Raises:
        StillFailingError: it failed transiently until ``policy.total_s`` were over.
        Exception: whatever else ``use`` raises, at once.
    """
    started = time.monotonic()
    retrying = Retrying(
        stop=stop_before_delay(policy.total_s),
        wait=wait_random_exponential(multiplier=policy.wait_first_s, max=policy.wait_max_s),
        retry=retry_if_exception(is_transient),
    )
    try:
        return retrying(use)
    except RetryError as gave_up:
        error = gave_up.last_attempt.exception()
        assert isinstance(error, OSError)
        tries = gave_up.last_attempt.attempt_number
        raise StillFailingError(
            error.errno or errno.ETIMEDOUT,
            f"{error.strerror or error} (tried {tries} time{'' if tries == 1 else 's'} in "
            f"{time.monotonic() - started:.1f} s)",
            *([error.filename] if error.filename else []),
        ) from error
