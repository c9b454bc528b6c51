"""A rank's program that starts a process, which writes through ``chaos::``: METHOD PATH.

A program of its own, because a child that is forked from a test's process, which has threads, may
die of what they hold.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import fsspec


def write(path: str, results: Any) -> None:
    fs = fsspec.filesystem("chaos", target_protocol="file")
    try:
        fs.pipe_file(path, b"x")
        results.put("written")
    except OSError as error:
        results.put(str(error))


def main() -> None:
    method, path = sys.argv[1:]
    context: Any = multiprocessing.get_context(method)
    results = context.SimpleQueue()
    child = context.Process(target=write, args=(path, results))
    child.start()
    print(results.get())
    child.join()


if __name__ == "__main__":
    main()
