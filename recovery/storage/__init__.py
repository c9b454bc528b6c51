"""Where checkpoints are kept: local directories, S3, and other object stores through fsspec.

`open_storage` turns a path or URL into a `Storage`; the store's protocol is written on top of that.
Importing this package imports neither torch nor fsspec. Called by `seatrial.recovery.directory`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ..errors import CheckpointError
from .local import LocalStorage
from .local_attempt import collected
from .options import offered_options
from .protocol import Attempt, Files, Sink, Source, Storage

__all__ = [
    "Attempt",
    "Files",
    "Sink",
    "Source",
    "Storage",
    "absolute",
    "collected",
    "is_url",
    "open_storage",
]

_LOCAL_PROTOCOLS = ("file", "local")
_S3_PROTOCOLS = ("s3", "s3a")
_LOST_URL = re.compile(r"(?:^|/)([a-z][a-z0-9+.-]+):/")


def is_url(location: str | os.PathLike[str]) -> bool:
    """Whether ``location`` is a URL rather than a path."""
    return isinstance(location, str) and ("://" in location or "::" in location)


def absolute(location: str | os.PathLike[str]) -> str:
    """``location``, whatever the working directory will be."""
    return str(location) if is_url(location) else os.path.abspath(location)


def open_storage(
    location: str | os.PathLike[str],
    *,
    options: Mapping[str, object] | None = None,
    single_writer: bool = False,
) -> Storage:
    """The storage at ``location``; nothing is contacted yet.

    Args:
        location: a path, ``file://…``, ``s3://bucket/prefix``, or another URL that fsspec knows.
        options: what fsspec's file system of that protocol takes; none for a path. If left out
            for a URL, those that were offered for it (`storage.options.offered`), and fsspec's own.
        single_writer: the user's word that nobody else saves there, for a storage that cannot
            publish exactly once.

    Raises:
        CheckpointError: a URL that cannot be used, or a package that it needs is missing.
    """
    if not is_url(location):
        return _local(Path(location), options)
    url = str(location)
    protocol, separator, rest = url.partition("://")
    if "::" in url or not separator or not rest.strip("/"):
        raise CheckpointError(
            f"{url!r} cannot hold checkpoints; give a path or one URL such as s3://bucket/prefix, "
            "without a chain of file systems"
        )
    if protocol in _LOCAL_PROTOCOLS:
        return _local(Path(rest), options)
    from .objects import ObjectStorage

    given = offered_options(url) if options is None else options
    if protocol in _S3_PROTOCOLS:
        from .s3 import S3Objects

        return ObjectStorage(S3Objects(url, given))
    from .generic import FsspecObjects

    return ObjectStorage(FsspecObjects(url, given, single_writer=single_writer))


def _local(path: Path, options: Mapping[str, object] | None) -> LocalStorage:
    protocol = _LOST_URL.search(str(path))
    if protocol and not path.exists():
        raise CheckpointError(
            f"{str(path)!r} looks like a URL that was made a path, which loses a slash; give the "
            f"URL as text, such as '{protocol[1]}://…'"
        )
    if options:
        raise CheckpointError(
            f"storage_options are for URLs, and {path} is a directory; leave them out"
        )
    return LocalStorage(path)
