"""A FUSE file system that passes everything on to a directory and forgets what was not fsynced.

It sees what native code does (``torch.save`` to a path, safetensors, ``os.replace``), which no
Python hook does. While the power is off, every operation fails with EIO. Commands come as the
extended attribute of any path, `seatrial.chaos.powerloss.control.CONTROL`: ``off SURVIVES`` cuts,
``on`` ends the outage. A disk that keeps its power is the same without the memory of what was
synced. Mounted by `seatrial.chaos.observed.filesystem`, which lets one operation in at a time.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mfusepy

from .control import CONTROL, LOSSES
from .volatile import SURVIVES, Steady, Survives, Volatile


class PowerFileSystem(mfusepy.Operations):  # type: ignore[misc]
    """Operations on ``directory/live``. Paths are absolute within the mount. One at a time."""

    use_ns = True

    def __init__(self, directory: Path, *, loses_power: bool = True) -> None:
        self._directory = directory
        self._live = directory / "live"
        self._live.mkdir()
        self._loses_power = loses_power
        self._volatile = Volatile(self._live, directory / "durable") if loses_power else Steady()
        self._is_on = True

    def init_with_config(self, _: object, config: Any) -> None:
        # Names and sizes change behind the kernel's back at a cut.
        if config is not None:
            config.entry_timeout = config.attr_timeout = config.negative_timeout = 0
            config.hard_remove = 1  # an open file that is removed needs no other name meanwhile

    # What is asked of the file system itself.

    def setxattr(self, path: str, name: str, value: bytes, *_flags: object) -> int:
        if name != CONTROL:
            raise mfusepy.FuseOSError(errno.ENOTSUP)
        command, _, text = bytes(value).decode().partition(" ")
        known = [each for each in SURVIVES if each == text]
        if command == "off" and known and self._loses_power:
            self.cut(known[0])
        elif command == "on":
            self._is_on = True
        else:
            raise mfusepy.FuseOSError(errno.EINVAL)
        return 0

    def cut(self, survives: Survives) -> None:
        """Take the power, if it is on."""
        if self._is_on:
            self._is_on = False
            (self._directory / LOSSES).write_text(json.dumps(self._volatile.cut(survives)))

    def getxattr(self, path: str, name: str, *_: object) -> bytes:
        if name != CONTROL or not self._loses_power:
            raise mfusepy.FuseOSError(errno.ENODATA)
        return b"on" if self._is_on else b"off"

    # Reading.

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        found = os.fstat(fh) if fh else os.lstat(self._at(path))
        names = ("mode", "size", "nlink", "uid", "gid", "blocks")
        facts = {f"st_{name}": getattr(found, f"st_{name}") for name in names}
        times = ("mtime", "ctime", "atime")
        return facts | {f"st_{name}": getattr(found, f"st_{name}_ns") for name in times}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._at(path))]

    def open(self, path: str, flags: int) -> int:
        # The kernel has taken O_APPEND into account in the offsets of writes.
        handle = os.open(self._at(path), flags & ~(os.O_APPEND | os.O_NOFOLLOW))
        if flags & os.O_TRUNC:
            self._volatile.wrote(os.fstat(handle).st_ino)
        return handle

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._require_power()
        return os.pread(fh, size, offset)

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def opendir(self, path: str) -> int:
        return os.open(self._at(path), os.O_RDONLY | os.O_DIRECTORY)

    def releasedir(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._live)
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}

    # Changing. Each is done first and told afterwards.

    def create(self, path: str, mode: int, fi: object = None) -> int:
        handle = os.open(self._at(path), os.O_CREAT | os.O_RDWR, mode)
        self._volatile.made(path[1:])
        return handle

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._require_power()
        written = os.pwrite(fh, data, offset)
        self._volatile.wrote(os.fstat(fh).st_ino)
        return written

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        self._require_power()
        target = fh if fh else self._at(path)
        os.truncate(target, length)
        self._volatile.truncated(os.stat(target).st_ino, length)
        return 0

    def fallocate(self, path: str, mode: int, offset: int, length: int, fh: int) -> int:
        self._require_power()
        if mode:
            raise mfusepy.FuseOSError(errno.ENOTSUP)
        before = os.fstat(fh).st_size
        os.posix_fallocate(fh, offset, length)
        if os.fstat(fh).st_size != before:
            self._volatile.truncated(os.fstat(fh).st_ino, os.fstat(fh).st_size)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._require_power()
        self._volatile.synced_file(fh)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._at(path)
        self._volatile.synced_directory(path[1:])
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._at(path), mode)
        self._volatile.made(path[1:])
        return 0

    def rename(self, old: str, new: str, *_: object) -> int:
        replaced = self._last_name(new)
        os.rename(self._at(old), self._at(new))
        self._volatile.removed(replaced)
        return 0

    def link(self, target: str, source: str) -> int:
        os.link(self._at(source), self._at(target))
        return 0

    def symlink(self, target: str, source: str) -> int:
        if self._loses_power:  # what becomes of one is not simulated
            raise mfusepy.FuseOSError(errno.ENOTSUP)
        os.symlink(source, self._at(target))
        return 0

    def readlink(self, path: str) -> str:
        return os.readlink(self._at(path))

    def unlink(self, path: str) -> int:
        return self._remove(os.unlink, path)

    def rmdir(self, path: str) -> int:
        return self._remove(os.rmdir, path)

    def chmod(self, path: str, mode: int) -> int:
        return self._pass_on(os.chmod, path, mode)

    def chown(self, path: str, uid: int, gid: int) -> int:
        return self._pass_on(os.chown, path, uid, gid)

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        target = self._at(path)
        if times is None:
            os.utime(target)
        else:
            os.utime(target, ns=times)
        return 0

    def _remove(self, call: Callable[[Path], None], path: str) -> int:
        removed = self._last_name(path)
        call(self._at(path))
        self._volatile.removed(removed)
        return 0

    def _last_name(self, path: str) -> int:
        """The inode of which ``path`` is the last name; -1 for none."""
        try:
            found = os.lstat(self._at(path))
        except FileNotFoundError:
            return -1
        return found.st_ino if stat.S_ISDIR(found.st_mode) or found.st_nlink == 1 else -1

    def _pass_on(self, call: Callable[..., object], path: str, *arguments: object) -> int:
        call(self._at(path), *arguments)
        return 0

    def _require_power(self) -> None:
        if not self._is_on:
            raise mfusepy.FuseOSError(errno.EIO)

    def _at(self, path: str) -> Path:
        self._require_power()
        return self._live / path[1:]
