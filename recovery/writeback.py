"""Asking the kernel for space and for early writeback; both only make things faster or clearer.

Guarantees: `preallocate` raises `OSError` where there is certainly no room, before anything is
written; `start_writeback` lets the disk begin while the next bytes are still being prepared, so
that the final fsync finds little left to do.

Does not: make anything durable (only fsync does), or fail where the kernel or the file system has
no such call. Torch-free; called by the writer.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from typing import Any

__all__ = ["preallocate", "start_writeback"]

_SYNC_FILE_RANGE_WRITE = 2
_NOT_THERE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV, errno.EPERM)


def preallocate(file: int, size_bytes: int) -> None:
    """Reserve ``size_bytes``; the file has that size from then on.

    By the system call itself: the C library's ``posix_fallocate`` writes every block where the file
    system does not support it.
    """
    call = _libc_function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if call is None or size_bytes == 0 or call(file, 0, 0, size_bytes) == 0:
        return
    number = ctypes.get_errno()
    if number not in _NOT_THERE:
        raise OSError(number, f"{os.strerror(number)} for {size_bytes} bytes")


def start_writeback(file: int, offset: int, length: int) -> None:
    """Begin to write these bytes of the page cache to the disk; does not wait for it."""
    call = _libc_function(
        "sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
    )
    if call is not None:
        # A failure of the disk is reported by the fsync that follows.
        call(file, offset, length, _SYNC_FILE_RANGE_WRITE)


@cache
def _libc_function(name: str, *arguments: Any) -> Any:
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    function.argtypes = arguments
    function.restype = ctypes.c_int
    return function
