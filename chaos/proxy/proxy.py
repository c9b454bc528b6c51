"""An HTTP proxy in a thread of this process, below every client's own retries.

Guarantees: what is passed on is what the client sent, path and query byte for byte and with its own
Host, so that signatures (SigV4) stay valid; every request is remembered with what was done to it;
when the proxy is closed, nothing of it listens any more, and no request that it held back lands.

Does not: speak TLS, or pass a body on before it has all of it. Torch-free.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType

from aiohttp import ClientSession, TCPConnector, web
from yarl import URL

from .rule import HttpFault

__all__ = ["HttpProxy", "Seen"]

_BODY_BYTES_MAX = 5 << 30
_PIECE_BYTES = 16 << 10
_NOT_PASSED_ON = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "expect", "content-length", "upgrade"}
)
_OF_THE_SESSION = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
_START_S = 30


@dataclass(frozen=True)
class Seen:
    """One request: ``fault`` is what was done to it, empty for nothing; ``status`` the server's
    answer, None if it was not asked."""

    method: str
    path: str
    fault: str
    status: int | None


@dataclass(frozen=True)
class _Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class HttpProxy:
    """Passes requests on to ``upstream``, such as ``http://127.0.0.1:9000``; a context manager.

    Args:
        upstream: the server, without a path.
        faults: what goes wrong, as values or as text; see `HttpFault`. If several strike at one
            request, the first is taken.
    """

    def __init__(self, upstream: str, faults: Iterable[HttpFault | str] = ()) -> None:
        self._upstream = upstream.rstrip("/")
        self._faults: list[HttpFault] = []
        self._counts: list[int] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="seatrial-proxy", daemon=True)
        self._ready = threading.Event()
        self._over = asyncio.Event()
        self._released = asyncio.Event()
        self._held: set[asyncio.Task[None]] = set()
        self._error: Exception | None = None
        self.seen: list[Seen] = []
        """Every request so far, in the order in which they were answered."""
        self.port = 0
        self.plan(*faults)

    @property
    def url(self) -> str:
        """Where the proxy listens; the client's endpoint."""
        return f"http://127.0.0.1:{self.port}"

    def plan(self, *faults: HttpFault | str) -> None:
        """Replace the faults; counting starts anew."""
        given = [HttpFault.parse(each) if isinstance(each, str) else each for each in faults]
        self._faults, self._counts = given, [0] * len(given)

    @property
    def never_struck(self) -> list[HttpFault]:
        """The faults that no request has met."""
        struck = {seen.fault for seen in self.seen}
        return [fault for fault in self._faults if str(fault) not in struck]

    def release(self, timeout_s: float = 30.0) -> list[int | None]:
        """Let the requests land that ``hold`` kept back; the server's answers to them."""

        async def land() -> list[int | None]:
            before = len(self.seen)
            self._released.set()
            await asyncio.gather(*self._held)
            self._released.clear()
            return [seen.status for seen in self.seen[before:] if seen.fault.endswith("(landed)")]

        return asyncio.run_coroutine_threadsafe(land(), self._loop).result(timeout_s)

    def __enter__(self) -> HttpProxy:
        self._thread.start()
        if not self._ready.wait(_START_S) or self._error is not None:
            raise OSError(f"the proxy does not start: {self._error}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    # In the thread

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:
            self._error = error
            self._ready.set()
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        application = web.Application(client_max_size=_BODY_BYTES_MAX)
        application.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = runner.addresses[0][1]
            connector = TCPConnector(limit=0)
            async with ClientSession(connector=connector, auto_decompress=False) as session:
                self._session = session
                self._ready.set()
                await self._over.wait()
                for task in self._held:
                    task.cancel()
                await asyncio.gather(*self._held, return_exceptions=True)
        finally:
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        fault = self._due(request.method, request.raw_path)
        action = fault.action if fault else ""
        if fault is not None and action == "refuse":
            self._remember(request, fault, None)
            return _refusal(fault)
        if action in ("reset", "hold"):
            if fault is not None and action == "hold":
                task = asyncio.ensure_future(self._land(request, body, fault))
                self._held.add(task)
                task.add_done_callback(self._held.discard)
            self._remember(request, fault, None)
            return _reset(request)
        answer = await self._forward(request, body)
        self._remember(request, fault, answer.status)
        if action == "lose-reply":
            return _reset(request)
        return await _answered(request, answer, fault)

    def _due(self, method: str, path: str) -> HttpFault | None:
        due = None
        for index, fault in enumerate(self._faults):
            if fault.matches(method, path):
                self._counts[index] += 1
                if due is None and fault.strikes(self._counts[index]):
                    due = fault
        return due

    def _remember(
        self, request: web.Request, fault: HttpFault | None, status: int | None, more: str = ""
    ) -> None:
        said = f"{fault or ''}{more}"
        self.seen.append(Seen(request.method, request.raw_path, said, status))

    async def _land(self, request: web.Request, body: bytes, fault: HttpFault) -> None:
        await self._released.wait()
        answer = await self._forward(request, body)
        self._remember(request, fault, answer.status, " (landed)")

    async def _forward(self, request: web.Request, body: bytes) -> _Answer:
        headers = [
            (name, value)
            for name, value in request.headers.items()
            if name.lower() not in _NOT_PASSED_ON
        ]
        async with self._session.request(
            request.method,
            URL(self._upstream + request.raw_path, encoded=True),
            headers=headers,
            data=body,
            allow_redirects=False,
            skip_auto_headers=_OF_THE_SESSION,
        ) as answer:
            content = await answer.read()
            kept = {
                name: value
                for name, value in answer.headers.items()
                if name.lower() not in _NOT_PASSED_ON
            }
            if request.method == "HEAD" and "Content-Length" in answer.headers:
                kept["Content-Length"] = answer.headers["Content-Length"]
            return _Answer(answer.status, kept, content)


def _refusal(fault: HttpFault) -> web.Response:
    text = f"<Error><Code>{fault.code}</Code><Message>injected by '{fault}'</Message></Error>"
    return web.Response(status=fault.status, text=text, content_type="application/xml")


def _reset(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()  # of which nothing arrives


async def _answered(
    request: web.Request, answer: _Answer, fault: HttpFault | None
) -> web.StreamResponse:
    action, body = (fault.action if fault else ""), answer.body
    if action == "flip" and body:
        changed = bytearray(body)
        changed[len(changed) // 2] ^= 1
        body = bytes(changed)
    if fault is None or action not in ("slow", "cut"):
        return web.Response(
            status=answer.status,
            headers=answer.headers,
            body=None if request.method == "HEAD" else body,
        )
    response = web.StreamResponse(status=answer.status, headers=answer.headers)
    response.content_length = len(body)
    await response.prepare(request)
    if action == "cut":
        await response.write(body[: fault.keep])
        return _reset(request)
    for start in range(0, len(body), _PIECE_BYTES):
        piece = body[start : start + _PIECE_BYTES]
        await asyncio.sleep(len(piece) / fault.rate)
        await response.write(piece)
    await response.write_eof()
    return response
