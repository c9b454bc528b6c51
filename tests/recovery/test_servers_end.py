"""A server that a test's fixture started ends with its pytest, even if that is killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import object_servers
import pytest

TESTS = """
import os, pathlib, sys
import pytest
from object_servers import seaweedfs

@pytest.fixture
def server():
    with seaweedfs(pathlib.Path(os.environ["SERVER_DATA"])) as server:
        yield server

def test_it_runs(server):
    print("up", file=sys.__stderr__, flush=True)
    sys.__stdin__.read(1)
"""
ENDS_WITHIN_S = 60


def processes_with(word: str) -> list[int]:
    """Every process that has ``word`` in one of its arguments."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = place.read_bytes()
        except OSError:
            continue
        if word.encode() in arguments:
            found.append(int(place.parent.name))
    return found


@pytest.fixture
def inner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A pytest whose test waits beside a running server."""
    (tmp_path / "test_inner.py").write_text(TESTS)
    data = tmp_path / "data"
    data.mkdir()
    programs = str(Path(object_servers.__file__).parent)
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"]
    process = subprocess.Popen(
        [*command, "test_inner.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": programs, "SERVER_DATA": str(data)},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()
            for pid in processes_with(str(data)):
                os.kill(pid, signal.SIGKILL)


def test_seaweedfs_is_gone_when_its_pytest_is_killed(
    inner: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert inner.stderr is not None
    assert inner.stderr.readline() == "up\n"
    servers = processes_with(str(tmp_path / "data"))
    assert servers
    with ExitStack() as stack:
        watched = [os.pidfd_open(pid) for pid in servers]
        for descriptor in watched:
            stack.callback(os.close, descriptor)
        inner.kill()
        inner.wait()
        for descriptor in watched:
            ended, _, _ = select.select([descriptor], [], [], ENDS_WITHIN_S)
            assert ended, f"still there: {processes_with(str(tmp_path / 'data'))}"
    assert processes_with(str(tmp_path / "data")) == []
