"""Which failures of a storage say something about the bytes that were to be read.

Guarantees: a file that is missing, is no file, or is on blocks that cannot be read is damage, named
in full; whatever else fails (permission, a stale mount, no network) stays what it is, for it says
nothing about the checkpoint.

Does not: try again. Torch-free; called by the storages and by whoever reads files.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import DamagedCheckpointError

__all__ = ["named"]

_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO)
_UNREADABLE = (errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO))


@contextmanager
def named(path: str) -> Iterator[None]:
    """Raise an `OSError` that says something about the bytes of ``path`` as damage."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) or error.errno in _MISSING:
            cause = error.strerror or "no such file"
            raise DamagedCheckpointError(f"{path} is missing: {cause}") from error
        if error.errno in _UNREADABLE:
            raise DamagedCheckpointError(f"{path} is unreadable: {error}") from error
        raise
