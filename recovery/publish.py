"""Publishing a small file exactly once: `link()` of a complete, durable temporary.

Guarantees on POSIX file systems: the name is absent or complete, never partial; of several
publishers of one name exactly one wins, and the others learn it; on return the content and the
name are durable. A publisher that holds its directory open cannot publish into another directory
that took the name since. A success whose reply was lost (NFS) is recognised by the link count.

Does not: retry, overwrite, or remove temporaries of publishers that died (`.NAME.*.tmp`). A file
system without exclusive links (FAT, many FUSE bridges to object stores) is refused by
`probe_publish`. Anyone may call it; torch-free.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from .errors import AlreadyPublishedError, StorageUnsupportedError
from .probe import around, perform

__all__ = [
    "fsync_directory",
    "naming",
    "open_directory",
    "open_regular",
    "probe_publish",
    "publish_at",
    "publish_once",
]

TEMPORARY_SUFFIX = ".tmp"
_WRITE_BYTES_MAX = 1 << 30
_PASSING = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES,
)  # fmt: skip


@contextmanager
def open_directory(path: Path) -> Iterator[int]:
    """A descriptor of the directory itself: a symlink in its place raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_regular(directory: int, name: str) -> int:
    """A descriptor to read ``name`` in the open ``directory``, if that is a regular file.

    Raises:
        OSError: `ELOOP` for a symlink, `EISDIR` for anything else that is no file. A named pipe is
            not waited for.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(name, flags, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EISDIR, "not a regular file", name)
    return file


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let an `OSError` of an open file say its full name: the kernel knows a number only."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = os.fspath(path), None
        raise


def fsync_directory(path: Path) -> None:
    """Make the names in ``path`` durable."""
    with open_directory(path) as descriptor:
        _fsync(descriptor, path)


def _fsync(descriptor: int, path: str | os.PathLike[str]) -> None:
    with naming(path):
        perform("storage/sync", lambda _: os.fsync(descriptor), file=str(path))


def publish_once(path: Path, data: bytes, *, event: str = "publish") -> Literal["won", "ours"]:
    """`publish_at` in the directory of ``path``."""
    with open_directory(path.parent) as directory:
        return publish_at(directory, path, data, event=event)


def publish_at(
    directory: int, path: Path, data: bytes, *, event: str = "publish", **facts: object
) -> Literal["won", "ours"]:
    """Publish ``data`` as ``path.name`` in the open ``directory``.

    Announces ``EVENT/write``, ``EVENT/fsync``, ``EVENT/link`` and ``EVENT/directory`` around the
    four steps, with ``file`` and the given ``facts``.

    Returns:
        ``"won"``, or ``"ours"`` when the very same content was there already.

    Raises:
        AlreadyPublishedError: the name holds something else.
        OSError: nothing was published, unless it came from ``EVENT/directory``: then the name is
            there and may not survive a power cut.
    """
    name = path.name
    temporary = f".{name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
    partial = str(path.with_name(temporary))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with naming(partial):
        file = perform(
            "storage/create",
            lambda _: os.open(temporary, flags, 0o644, dir_fd=directory),
            file=partial,
        )
    try:
        with around(f"{event}/write", file=partial, **facts), naming(partial):
            perform("storage/write", lambda content: write_all(file, content), data, file=partial)
        with around(f"{event}/fsync", file=partial, **facts):
            _fsync(file, partial)
        with around(f"{event}/link", file=str(path), **facts):
            outcome = perform(
                "storage/publish",
                lambda _: _link(directory, temporary, name, data, path),
                lost="won",
                file=str(path),
            )
    finally:
        os.close(file)
        with suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
    # Also when it was there already: whoever linked it may have died before this fsync.
    with around(f"{event}/directory", file=str(path.parent), **facts):
        _fsync(directory, path.parent)
    return outcome


def _link(
    directory: int, temporary: str, name: str, data: bytes, path: Path
) -> Literal["won", "ours"]:
    try:
        os.link(temporary, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
        return "won"
    except (FileExistsError, FileNotFoundError) as error:
        # The reply of a successful link may be lost on NFS, and its retry answers EEXIST; open(2)
        # says to look at the link count of one's own file. Missing is the temporary where a winner
        # has collected it.
        if _links(directory, temporary) == 2:
            return "won"
        try:
            published = _read(directory, name)
        except FileNotFoundError:
            raise error from None
        if published == data:
            return "ours"
        raise AlreadyPublishedError(
            f"{path} was published before with other content; this attempt lost the race and its "
            "files are leftovers. Resume from the published checkpoint, or remove it to redo it"
        ) from None


def _links(directory: int, name: str) -> int:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_nlink
    except FileNotFoundError:
        return 0


def write_all(file: int, data: bytes | bytearray | memoryview) -> None:
    """Write everything, however short single writes are."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest[:_WRITE_BYTES_MAX]) :]


def _read(directory: int, name: str) -> bytes:
    with open(open_regular(directory, name), "rb") as stream:
        return stream.read()


def probe_publish(directory: Path) -> None:
    """Prove that ``directory`` can publish exactly once, or raise `StorageUnsupportedError`.

    Raises:
        OSError: nothing could be written there at the moment, which proves nothing.
    """
    names = [f".probe.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}" for _ in range(2)]
    with open_directory(directory) as at:
        try:
            os.close(os.open(names[0], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=at))
            os.link(names[0], names[1], src_dir_fd=at, dst_dir_fd=at)
            if os.stat(names[0], dir_fd=at).st_nlink != 2:
                raise StorageUnsupportedError(_unsupported(directory, "link() made a copy"))
            try:
                os.link(names[0], names[1], src_dir_fd=at, dst_dir_fd=at)
            except FileExistsError:
                return
            raise StorageUnsupportedError(_unsupported(directory, "link() replaced a file"))
        except OSError as error:
            if error.errno in _PASSING:
                error.filename, error.filename2 = str(directory), None
                raise
            raise StorageUnsupportedError(_unsupported(directory, str(error))) from error
        finally:
            for name in names:
                with suppress(OSError):
                    os.unlink(name, dir_fd=at)


def _unsupported(directory: Path, cause: str) -> str:
    return (
        f"{directory} cannot publish a checkpoint exactly once ({cause}); use a file system with "
        "exclusive hard links, such as ext4, XFS, Btrfs, tmpfs, NFS or Lustre"
    )
