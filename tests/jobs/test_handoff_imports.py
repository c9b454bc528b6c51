"""The oracle of resharded restores shares no code with what it judges."""

from __future__ import annotations

import ast
from pathlib import Path

from seatrial.plugins.jobs import handoff


def test_the_oracle_takes_nothing_from_the_recovery_but_definitions() -> None:
    tree = ast.parse(Path(handoff.__file__).read_text())
    taken = {
        f"{node.module}.{each.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("seatrial.")
        for each in node.names
    }
    assert taken == {"seatrial.recovery.rng.derive_seed", "seatrial.recovery.state.TrainingState"}
