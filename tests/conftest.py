"""Shared by all tests: pytester, and the programs that ranks run in tests, importable by name."""

from __future__ import annotations

import sys
from pathlib import Path

pytest_plugins = "pytester"

# Launchers hand this process's import path to their ranks.
sys.path.insert(0, str(Path(__file__).with_name("programs")))
