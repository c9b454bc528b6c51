"""Places where the same store is tried: a directory, memory, moto and SeaweedFS.

A `Place` looks at what is stored by other means than the store: paths, fsspec's memory, boto3."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import pytest
from object_servers import BUCKET, S3Server, moto, seaweedfs

from seatrial.recovery import CheckpointStore, SeatrialReader, SeatrialWriter, inspect_store
from seatrial.recovery.inspect import StoreReport


@dataclass(frozen=True)
class Place:
    """A directory or a URL, and how to look into it behind the store's back."""

    location: str
    options: dict[str, object] = field(default_factory=dict)
    server: S3Server | None = None

    def store(self, **arguments: Any) -> CheckpointStore:
        return CheckpointStore(self.location, **self._arguments, **arguments)

    def writer(self, step: int) -> SeatrialWriter:
        return SeatrialWriter(self.location, step=step, **self._arguments)

    def reader(self, step: int | None = None) -> SeatrialReader:
        return SeatrialReader(self.location, step=step, **self._arguments)

    def inspect(self) -> StoreReport:
        return inspect_store(self.location, **self._arguments)

    @property
    def _arguments(self) -> dict[str, Any]:
        return {"storage_options": self.options} if self.options else {}

    @property
    def has_fsync(self) -> bool:
        return "://" not in self.location

    def names(self) -> list[str]:
        """Every file or object, relative to the location."""
        if self.server is not None:
            prefix = f"{self._prefix}/"
            pages = self.server.client().get_paginator("list_objects_v2")
            found = pages.paginate(Bucket=BUCKET, Prefix=prefix)
            keys = (each["Key"] for page in found for each in page.get("Contents", []))
            return sorted(key.removeprefix(prefix) for key in keys)
        root = self.location.removeprefix("memory:/")
        return sorted(name.removeprefix(f"{root}/") for name in self._file_system.find(root))

    def read(self, name: str) -> bytes:
        if self.server is not None:
            answer = self.server.client().get_object(Bucket=BUCKET, Key=f"{self._prefix}/{name}")
            return bytes(answer["Body"].read())
        return bytes(self._file_system.cat_file(self._path(name)))

    def write(self, name: str, content: bytes) -> None:
        if self.server is not None:
            key = f"{self._prefix}/{name}"
            self.server.client().put_object(Bucket=BUCKET, Key=key, Body=content)
        else:
            self._file_system.pipe_file(self._path(name), content)

    def flip(self, name: str, position: int) -> None:
        """Change one bit of the byte at ``position``; below 0, from the end."""
        content = bytearray(self.read(name))
        content[position] ^= 4
        self.write(name, bytes(content))

    def remove(self, name: str) -> None:
        if self.server is not None:
            self.server.client().delete_object(Bucket=BUCKET, Key=f"{self._prefix}/{name}")
        else:
            self._file_system.rm_file(self._path(name))

    def uploads(self) -> list[str]:
        """The keys of unfinished uploads below this place."""
        assert self.server is not None
        answer = self.server.client().list_multipart_uploads(Bucket=BUCKET)
        keys = (each["Key"] for each in answer.get("Uploads", []))
        return sorted(key for key in keys if key.startswith(f"{self._prefix}/"))

    def shard(self, step: int, rank: int = 0) -> str:
        """The name of a rank's shard of a step, of which there is one attempt."""
        (name,) = [
            name
            for name in self.names()
            if name.startswith(f"step-{step:08d}/") and name.endswith(f"{rank:05d}.safetensors")
        ]
        return name

    @property
    def _prefix(self) -> str:
        return self.location.removeprefix(f"s3://{BUCKET}/")

    def _path(self, name: str) -> str:
        return f"{self.location.removeprefix('memory:/')}/{name}"

    @property
    def _file_system(self) -> Any:
        return fsspec.filesystem("file" if self.has_fsync else "memory")


@pytest.fixture(scope="session")
def moto_server() -> Iterator[S3Server]:
    with moto() as server:
        yield server


@pytest.fixture(scope="module")
def weed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Ended with the module: one that has nothing to do still takes a sixth of a processor."""
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture
def moto_place(moto_server: S3Server) -> Iterator[Place]:
    """A prefix of its own; whatever goes wrong on the way there ends with the test."""
    yield _below(moto_server)
    moto_server.fault = lambda method, place: None


@pytest.fixture(params=["directory", "memory", "moto", "seaweedfs"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty place of every kind."""
    return _place(request, tmp_path)


@pytest.fixture(params=["directory", "moto", "seaweedfs"])
def shared_place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty place of every kind that several processes see."""
    return _place(request, tmp_path)


@pytest.fixture(params=["moto", "seaweedfs"])
def s3_place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return _place(request, tmp_path)


def _place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "directory":
        return Place(str(tmp_path / "store"))
    if request.param == "memory":
        return Place(f"memory://{secrets.token_hex(8)}")
    server = "moto_server" if request.param == "moto" else "weed_server"
    return _below(request.getfixturevalue(server))


def _below(server: S3Server) -> Place:
    prefix = f"{secrets.token_hex(8)}/run"
    return Place(f"s3://{BUCKET}/{prefix}", options=server.options, server=server)
