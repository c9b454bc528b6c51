from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .documents import all_blocks


@pytest.fixture(scope="module")
def example_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with every file that the documents tell a user to write."""
    directory = tmp_path_factory.mktemp("examples")
    for block in all_blocks("python"):
        if block.mark.startswith("file: "):
            (directory / block.mark.removeprefix("file: ")).write_text(block.text)
    return directory


def run_python(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter in ``directory``, as a user has it; warnings are errors."""
    # What this pytest process tells its children is no business of the user's command.
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
