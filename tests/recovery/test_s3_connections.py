"""What becomes of a connection to S3 that is left: by a request that took too long, or in a child.

The server is our own, so that it answers when the test wants and keeps its connections."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from aiohttp import web
from fsspec.asyn import get_loop

from seatrial.recovery.storage import s3_client
from seatrial.recovery.storage.retry import RetryPolicy
from seatrial.recovery.storage.s3 import S3Objects

from .processes import Process

CONTENT = b"late" * 16
LISTING = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
ONCE = RetryPolicy(total_s=0.001, wait_first_s=0.001, wait_max_s=0.001)


class Server:
    """Answers any listing, and any GET once `release` is set: with `CONTENT`."""

    def __init__(self) -> None:
        self.port = 0
        self.asked = threading.Event()
        self.clients: list[tuple[str, int]] = []
        """Who asked, by request; a connection that was kept has the same port."""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def release(self) -> None:
        """Let the bodies go that are held, and those to come."""
        self._loop.call_soon_threadsafe(self._released.set)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._released, self._over = asyncio.Event(), asyncio.Event()
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        self._ready.set()
        await self._over.wait()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self.clients.append(request.transport.get_extra_info("peername"))
        if "list-type" in request.query:
            return web.Response(body=LISTING, content_type="application/xml")
        response = web.StreamResponse(status=206)
        response.content_length = len(CONTENT)
        response.headers["Content-Range"] = f"bytes 0-{len(CONTENT) - 1}/{len(CONTENT)}"
        await response.prepare(request)
        self.asked.set()
        await self._released.wait()
        await response.write(CONTENT)
        return response


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def objects(server: Server) -> S3Objects:
    options = {
        "endpoint_url": f"http://127.0.0.1:{server.port}",
        "key": "testing",
        "secret": "testing",
        "client_kwargs": {"region_name": "us-east-1"},
        "config_kwargs": {"s3": {"addressing_style": "path"}},
    }
    made = S3Objects("s3://seatrial/run", options)
    made.client.policy = ONCE
    return made


def test_a_body_that_comes_after_the_timeout_reaches_no_tensor(
    server: Server, objects: S3Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert objects.sizes() == {}
    target = bytearray(len(CONTENT))
    for seconds in (0.1, 0.5, 2, 10):  # until the request has come to the server, however slowly
        monkeypatch.setattr(s3_client, "_REQUEST_S", seconds)
        with pytest.raises(OSError, match="get_object") as caught:
            objects.read_into("shard", 0, memoryview(target), len(CONTENT))
        assert caught.value.errno == errno.ETIMEDOUT
        if server.asked.is_set():
            break
    assert server.asked.is_set()
    target[:] = b"good" * 16  # another checkpoint's
    server.release()
    monkeypatch.undo()
    # By the same event loop, which has seen by then whatever came before.
    another = bytearray(len(CONTENT))
    objects.read_into("shard", 0, memoryview(another), len(CONTENT))
    assert objects.sizes() == {}
    assert bytes(another) == CONTENT
    assert bytes(target) == b"good" * 16


def test_a_call_does_not_return_before_its_request_is_over(
    server: Server, objects: S3Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even while the event loop stands still, so that the request has yet to begin."""
    assert objects.sizes() == {}
    monkeypatch.setattr(s3_client, "_REQUEST_S", 0.1)
    server.release()
    target = bytearray(len(CONTENT))

    def read() -> None:
        with suppress(OSError):  # in time or not
            objects.read_into("shard", 0, memoryview(target), len(CONTENT))

    goes_on = threading.Event()
    get_loop().call_soon_threadsafe(goes_on.wait)
    reader = threading.Thread(target=read)
    reader.start()
    reader.join(2)  # fsspec's own timeout looks at the clock once a second
    returned = not reader.is_alive()
    if returned:
        target[:] = b"good" * 16
    goes_on.set()
    reader.join()
    if not returned:
        target[:] = b"good" * 16
    monkeypatch.undo()
    assert objects.sizes() == {}
    assert bytes(target) == b"good" * 16
    assert not returned


def test_a_child_that_drops_its_parents_client_leaves_the_parent_its_connections(
    server: Server, objects: S3Objects, fork: Callable[[Callable[[], object]], Process]
) -> None:
    """They are in an epoll instance that both share; what the child closes, nobody waits for."""
    assert objects.sizes() == {}

    def child() -> Any:
        gc.collect()
        return os.getpid()

    process = fork(child)
    assert process.result() == process.pid
    assert objects.sizes() == {}
    assert len(server.clients) == 2
    assert server.clients[0] == server.clients[1], "the connection was not kept"
