from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCENARIOS = Path(__file__).with_name("scenarios.py")

RunRanks = Callable[..., list[Any]]


@pytest.fixture
def run_ranks(tmp_path: Path) -> RunRanks:
    """``run_ranks("resume", "dp2", samples=40)`` runs a scenario on real ranks: results by rank."""
    runs = 0

    def run(scenario: str, topology: str, **options: object) -> list[Any]:
        nonlocal runs
        runs += 1
        directory = tmp_path / str(runs)
        directory.mkdir()
        pairs = [f"{name}={value}" for name, value in options.items()]
        # The limit is for a rank that hangs; nothing here is measured in seconds.
        done = subprocess.run(
            [sys.executable, SCENARIOS, scenario, topology, directory, *pairs],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        files = sorted(directory.glob("rank*.json"), key=lambda path: int(path.stem[4:]))
        return [json.loads(path.read_text()) for path in files]

    return run
