"""Requests to S3 through s3fs's client, with our own retries and errors.

Guarantees: the client is made in the process that uses it (one after a fork, never the parent's)
and never pickled; nothing is cached; the retries of s3fs and botocore are off, so the bound in
`seatrial.recovery.storage.retry` is real; every failure is an `OSError`, translated by
`seatrial.recovery.storage.s3_errors`. Several threads may use one.

Does not: verify what it reads. Torch-free; called by `seatrial.recovery.storage.s3`.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import importlib.util
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from ..errors import CheckpointError, DamagedCheckpointError
from ..probe import perform
from .retry import REMOTE, RetryPolicy, retried
from .s3_errors import as_os_error
from .secret import redacted

__all__ = ["S3Client"]

CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 20
_CONNECTIONS = 32
_REQUEST_S = 120.0  # for a whole request, whatever its connection says; then it is transient
_STREAM_BYTES = 1 << 20
_RANGE = re.compile(r"bytes [0-9]+-[0-9]+/([0-9]+)")

# What an S3 operation is to whoever interposes; its answer where it is acknowledged and lost.
_OPERATIONS: dict[str, tuple[str, dict[str, object]]] = {
    "put_object": ("storage/write", {}),
    "create_multipart_upload": ("storage/create", {}),
    "upload_part": ("storage/write", {"ETag": '"lost"'}),
    "complete_multipart_upload": ("storage/commit", {}),
    "abort_multipart_upload": ("storage/delete", {}),
    "delete_objects": ("storage/delete", {}),
    "get_object": ("storage/read", {}),
    "head_object": ("storage/stat", {}),
    "list_objects_v2": ("storage/list", {}),
    "list_multipart_uploads": ("storage/list", {}),
}

# Made by this process for these options: a client takes 0.2 s to make and keeps its connections.
_file_systems: dict[Any, Any] = {}


def _forget_in_child() -> None:
    """Never let a forked child finalize its parent's connections.

    The child shares the parent's epoll instance. A connection that is closed there is removed from
    it, and the parent would wait for answers until its timeout.
    """
    for file_system in _file_systems.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(file_system))
    _file_systems.clear()


def _close_all() -> None:
    from fsspec.asyn import get_loop, sync

    for file_system in _file_systems.values():
        creator = getattr(file_system, "_s3creator", None)
        if creator is not None:
            with suppress(Exception):
                sync(get_loop(), creator.__aexit__, None, None, None, timeout=1)
    _file_systems.clear()


os.register_at_fork(after_in_child=_forget_in_child)


class S3Client:
    """Requests for keys of one bucket below one prefix."""

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        if importlib.util.find_spec("s3fs") is None:
            raise CheckpointError(f"{url} needs s3fs; pip install 'seatrial[s3]'")
        self.bucket, _, prefix = url.partition("://")[2].partition("/")
        self._prefix = prefix.strip("/")
        self.url = f"s3://{self.bucket}{f'/{self._prefix}' if self._prefix else ''}"
        self._options = dict(options)
        self.policy: RetryPolicy = REMOTE

    def key(self, name: str) -> str:
        """The whole key of an object; ``name`` is relative to the URL."""
        return f"{self._prefix}/{name}" if self._prefix else name

    def name(self, key: str) -> str:
        """The inverse of `key`."""
        return key.removeprefix(f"{self._prefix}/") if self._prefix else key

    def call(self, operation: str, name: str, **arguments: Any) -> Any:
        """The answer to one S3 operation on the object ``name``; transient errors tried again."""
        return retried(lambda: self.call_once(operation, name, **arguments), self.policy)

    def call_once(self, operation: str, name: str, **arguments: Any) -> Any:
        """As `call`, tried once."""
        return self._run(operation, name, Key=self.key(name), **arguments)

    def call_bucket(self, operation: str, prefix: str, **arguments: Any) -> Any:
        """The answer to an operation on the keys that begin with ``prefix``."""
        return retried(
            lambda: self._run(operation, prefix, Prefix=self.key(prefix), **arguments),
            self.policy,
        )

    def call_plain(self, operation: str, **arguments: Any) -> Any:
        """The answer to an operation on the bucket."""
        return retried(lambda: self._run(operation, "", **arguments), self.policy)

    def get(self, name: str, bytes_max: int) -> bytes:
        """At most ``bytes_max`` bytes from the beginning of an object."""
        return retried(lambda: self.get_once(name, bytes_max), self.policy)

    def get_once(self, name: str, bytes_max: int) -> bytes:
        """As `get`, tried once."""

        async def body(response: Any) -> bytes:
            parts = []
            async with response["Body"] as stream:
                left = bytes_max
                while left and (part := await stream.read(min(left, _STREAM_BYTES))):
                    parts.append(part)
                    left -= len(part)
            return b"".join(parts)

        content: bytes = self._run("get_object", name, body, Key=self.key(name))
        return content

    def read_into(self, name: str, offset: int, target: memoryview, size_bytes: int) -> None:
        """Fill ``target`` from ``offset`` on, straight from the connection."""
        if not target:
            return

        async def body(response: Any) -> int:
            done = 0
            async with response["Body"] as stream:
                while part := await stream.read(_STREAM_BYTES):
                    target[done : done + len(part)] = part  # raises if it is too long
                    done += len(part)
            found = _RANGE.fullmatch(response.get("ContentRange", ""))
            if found and int(found[1]) != size_bytes:
                raise DamagedCheckpointError(
                    f"{self.url}/{name} has {found[1]} bytes where {size_bytes} were stored"
                )
            if done != len(target):
                raise ConnectionError(f"{done} of {len(target)} bytes came")
            return done

        def use() -> None:
            last = offset + len(target) - 1
            try:
                place = {"Key": self.key(name), "Range": f"bytes={offset}-{last}"}
                self._run("get_object", name, body, into=target, **place)
            except ValueError as error:
                raise DamagedCheckpointError(f"{self.url}/{name} has another size") from error

        retried(use, self.policy)

    def _run(
        self,
        operation: str,
        name: str,
        body: Callable[[Any], Awaitable[Any]] | None = None,
        into: memoryview | None = None,
        **arguments: Any,
    ) -> Any:
        """One request, which somebody may interpose on; ``into`` is what ``body`` fills."""
        event, lost = _OPERATIONS.get(operation, ("storage/stat", {}))
        if "IfNoneMatch" in arguments:
            event = "storage/publish"

        def send(data: Any) -> Any:
            if "Body" in arguments:
                arguments["Body"] = bytes(data)
            return self._send(operation, name, body, arguments)

        facts: dict[str, object] = {"file": f"{self.url}/{name}"}
        if "Delete" in arguments:
            facts["names"] = [self.name(each["Key"]) for each in arguments["Delete"]["Objects"]]
        return perform(event, send, arguments.get("Body", into), lost=lost, **facts)

    def _send(
        self,
        operation: str,
        name: str,
        body: Callable[[Any], Awaitable[Any]] | None,
        arguments: dict[str, Any],
    ) -> Any:
        from fsspec.asyn import get_loop, sync

        file_system = self._file_system()

        async def request() -> Any:
            try:
                await file_system.set_session()
            except (TypeError, ValueError) as error:  # botocore takes the options only here
                raise self._refusal(error) from None
            client = await file_system.get_s3(self.bucket)
            response = await getattr(client, operation)(Bucket=self.bucket, **arguments)
            return response if body is None else await body(response)

        try:
            # Cancelled, not left: a late body must not be written into a tensor that holds another.
            return sync(get_loop(), asyncio.wait_for, request(), _REQUEST_S)
        except Exception as error:
            translated = as_os_error(error, operation, f"{self.url}/{name}")
            if translated is None:
                raise
            raise translated from error

    def _file_system(self) -> Any:
        key = _identity(self._options)
        if key not in _file_systems:
            if not _file_systems:
                atexit.unregister(_close_all)  # a parent's
                atexit.register(_close_all)
            try:
                _file_systems[key] = self._made()
            except (TypeError, ValueError) as error:
                raise self._refusal(error) from None
        return _file_systems[key]

    def _refusal(self, error: Exception) -> CheckpointError:
        said = redacted(error, self._options)
        return CheckpointError(f"{self.url} cannot be opened with these storage options: {said}")

    def _made(self) -> Any:
        from fsspec.config import apply_config
        from s3fs import S3FileSystem

        # Here already: fsspec would not merge what its configuration says with ours.
        options = apply_config(S3FileSystem, dict(self._options))
        given = options.pop("config_kwargs", None)
        config: dict[str, object] = {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
            "max_pool_connections": _CONNECTIONS,
            # Digests are ours, and are checked on every read.
            "response_checksum_validation": "when_required",
            **(given if isinstance(given, dict) else {}),
            "retries": {"total_max_attempts": 1, "mode": "standard"},
        }
        return S3FileSystem(
            **options,
            config_kwargs=config,
            asynchronous=True,  # else s3fs closes it by itself, in whatever process
            skip_instance_cache=True,
            use_listings_cache=False,
        )


def _identity(value: object) -> object:
    """What is equal for equal options, and does not show their secrets as their repr would."""
    if isinstance(value, Mapping):
        return "mapping", tuple(sorted((str(key), _identity(each)) for key, each in value.items()))
    if isinstance(value, list | tuple):
        return tuple(map(_identity, value))
    return value if isinstance(value, str) else repr(value)
