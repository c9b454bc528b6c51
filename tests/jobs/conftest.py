from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import pytest

SCENARIOS = Path(__file__).with_name("scenarios.py")

RunRanks = Callable[..., list[Any]]
Once = Callable[[str, Callable[[Path], Any]], tuple[Path, Any]]


@pytest.fixture(scope="session")
def rank_host() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported torch once and forks ranks on request."""
    command = [sys.executable, str(SCENARIOS)]
    host = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with host:
        yield host
        cast(IO[str], host.stdin).close()


@pytest.fixture
def run_ranks(rank_host: subprocess.Popen[str], tmp_path: Path) -> RunRanks:
    """``run_ranks("resume", "dp2", samples=40)`` runs a scenario on real ranks: results by rank.

    A scenario that raises fails with what its ranks printed.
    """
    runs = 0

    def run(scenario: str, topology: str, **options: object) -> list[Any]:
        nonlocal runs
        runs += 1
        directory = tmp_path / str(runs)
        directory.mkdir()
        texts = {name: str(value) for name, value in options.items()}
        requests, answers = cast(IO[str], rank_host.stdin), cast(IO[str], rank_host.stdout)
        requests.write(json.dumps([scenario, topology, str(directory), texts]) + "\n")
        requests.flush()
        codes = json.loads(answers.readline())
        assert not any(codes), (directory / "errors").read_text()
        files = [directory / f"rank{rank}.json" for rank in range(len(codes))]
        return [json.loads(path.read_text()) for path in files]

    return run


@pytest.fixture
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """``once("name", make)``: a directory and what ``make(directory)`` returned, as JSON.

    Made by the first test that asks, for all tests and all workers of the session.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if base.name.startswith("popen-") else base

    def obtain(name: str, make: Callable[[Path], Any]) -> tuple[Path, Any]:
        directory = shared / name
        with directory.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            result = directory / "result.json"
            if not result.exists():
                directory.mkdir(exist_ok=True)
                result.write_text(json.dumps(make(directory)))
        return directory, json.loads(result.read_text())

    return obtain
