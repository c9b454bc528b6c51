"""The wheel holds the three subpackages below ``seatrial`` and nothing at anybody's top level.

Verifies the built file. Does not verify an installation from it, or the source distribution.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = ("chaos", "plugins", "recovery")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names in a wheel built from a copy of what git would see."""
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((REPOSITORY / name).read_bytes())
    for top in SOURCES:
        for path in (REPOSITORY / top).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                target = source / path.relative_to(REPOSITORY)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir"]
    built = subprocess.run(
        [*command, str(directory), str(source)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (file,) = directory.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        return archive.namelist()


def test_nothing_but_seatrial_is_installed_at_the_top_level(wheel: list[str]) -> None:
    tops = {PurePosixPath(name).parts[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"seatrial"}


def test_every_source_file_is_in_the_wheel(wheel: list[str]) -> None:
    sources = {
        f"seatrial/{path.relative_to(REPOSITORY)}"
        for top in SOURCES
        for path in (REPOSITORY / top).rglob("*")
        if path.suffix in (".py", ".typed")
    }
    assert sources
    assert sources == {name for name in wheel if name.startswith("seatrial/")}


def test_the_licence_comes_along(wheel: list[str]) -> None:
    assert any(name.endswith("/licenses/LICENSE") for name in wheel)
