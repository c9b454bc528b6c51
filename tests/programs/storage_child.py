"""A process that a rank starts anew, and that writes through ``chaos::``."""

from __future__ import annotations

from typing import Any

import fsspec


def write(path: str, results: Any) -> None:
    fs = fsspec.filesystem("chaos", target_protocol="file")
    try:
        fs.pipe_file(path, b"x")
        results.put("written")
    except OSError as error:
        results.put(str(error))
