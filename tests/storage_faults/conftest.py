"""An uninterrupted run, and file systems of fsspec: a directory, memory, and moto's S3."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from evidence import Evidence, uninterrupted
from object_servers import BUCKET, S3Server, moto


@pytest.fixture
def reference(tmp_path: Path) -> Evidence:
    """Six steps, and nothing was done to them."""
    return uninterrupted(tmp_path / "reference")


@pytest.fixture(scope="session")
def server() -> Iterator[S3Server]:
    with moto() as server:
        yield server


@pytest.fixture(scope="session")
def bucket(server: S3Server) -> Any:
    options = {**server.options, "use_listings_cache": False, "skip_instance_cache": True}
    return fsspec.filesystem("s3", **options)


@pytest.fixture(params=["file", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Any, str]:
    """``(chaos, target, root)``: the file system with faults, the one without, a directory."""
    if request.param == "file":
        target, root = fsspec.filesystem("file"), str(tmp_path / "d")
        target.mkdir(root)
    elif request.param == "memory":
        target, root = fsspec.filesystem("memory"), f"/{secrets.token_hex(8)}"
        target.mkdir(root)
    else:
        target, root = request.getfixturevalue("bucket"), f"{BUCKET}/{secrets.token_hex(8)}"
    return fsspec.filesystem("chaos", fs=target), target, root
