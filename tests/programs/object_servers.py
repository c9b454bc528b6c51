"""Object stores for tests, on this machine: moto's server in this process, and SeaweedFS.

Each takes ports that were free, so any number may run beside each other, and ends with the process
that started it, whatever ends that. A server that does not come up raises; nothing is skipped.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

BUCKET = "seatrial"
KEY, REGION = "testing", "us-east-1"  # the secret is the key
STARTS_MAX = 5
UP_WITHIN_S = 60


@dataclass
class S3Server:
    """A running server. ``fault(method, path_and_query)`` may name what goes wrong (moto only)."""

    endpoint: str
    fault: Callable[[str, str], str | None] = field(default=lambda method, place: None)
    requests: list[tuple[str, str]] = field(default_factory=list)
    key: str = KEY
    restart: Callable[[], None] | None = None
    """Kills the server with SIGKILL and starts it on the same data (SeaweedFS only)."""

    @property
    def options(self) -> dict[str, object]:
        """The ``storage_options`` to reach it."""
        return {
            "endpoint_url": self.endpoint,
            "key": self.key,
            "secret": self.key,
            "client_kwargs": {"region_name": REGION},
        }

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables to reach it, where no options can be given."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.key,
            "AWS_DEFAULT_REGION": REGION,
        }

    def client(self) -> Any:
        """A client that shares no code with the store."""
        return _client(self.endpoint, self.key)


@cache
def _client(endpoint: str, key: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=key,
        aws_secret_access_key=key,
        region_name=REGION,
        config=Config(
            retries={"max_attempts": 0},
            connect_timeout=5,
            read_timeout=20,
            s3={"addressing_style": "path"},
        ),
    )


@contextmanager
def moto() -> Iterator[S3Server]:
    """moto's S3 in a thread of this process."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = DomainDispatcherApplication(create_backend_app)
    server = S3Server(endpoint="")
    listening = make_server(
        "127.0.0.1", 0, _faulty(application, server), threaded=True, processes=1
    )
    server.endpoint = f"http://127.0.0.1:{listening.server_port}"
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    try:
        server.client().create_bucket(Bucket=BUCKET)
        yield server
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


def _faulty(application: Any, server: S3Server) -> Any:
    """``application``, with what ``server.fault`` says.

    That is a status, ``applied`` and a status, ``lost`` or ``cut``.
    """

    def serve(environ: dict[str, Any], start_response: Any) -> Any:
        query = environ.get("QUERY_STRING", "")
        place = f"{environ['PATH_INFO']}{f'?{query}' if query else ''}"
        method = environ["REQUEST_METHOD"]
        server.requests.append((method, place))
        fault = server.fault(method, place)
        if fault is None:
            return application(environ, start_response)
        applied = fault.startswith(("lost", "applied "))
        if applied:  # it takes effect, and nobody hears of it
            list(application(environ, lambda *_: lambda _: None))
            fault = fault.removeprefix("applied ")
        if fault in ("lost", "cut"):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return []
        status, _, code = fault.partition(" ")
        body = f"<Error><Code>{code}</Code><Message>as the test wants</Message></Error>".encode()
        if not applied:  # else the body was read, and reading on would wait for the client
            with suppress(OSError):
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response(
            f"{status} {code}",
            [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))],
        )
        return [body]

    return serve


@contextmanager
def seaweedfs(directory: Path) -> Iterator[S3Server]:
    """The real SeaweedFS, one process, with its data in ``directory``."""
    program = Path(sysconfig.get_path("scripts")) / "weed"
    for start in range(STARTS_MAX):
        ports = [_port() for _ in range(4)]
        data, log = directory / f"data-{start}", directory / f"log-{start}"
        data.mkdir()
        command = [str(program), *_arguments(data, ports)]
        process = _start(command, log, {"GOMEMLIMIT": "256MiB", "GOGC": "50"})
        server = S3Server(endpoint=f"http://127.0.0.1:{ports[0]}")

        def restart(
            command: list[str] = command, log: Path = log, server: S3Server = server
        ) -> None:
            nonlocal process
            process.kill()
            process.wait()
            process = _start(command, log, {"GOMEMLIMIT": "256MiB", "GOGC": "50"})
            if not _is_up(server, process):
                raise RuntimeError("SeaweedFS did not come back after SIGKILL")

        server.restart = restart
        try:
            if _is_up(server, process):
                yield server
                return
        finally:
            process.kill()  # It takes its time to end, and its data are not wanted any more.
            process.wait()
    raise RuntimeError(
        f"SeaweedFS did not start {STARTS_MAX} times; its last words: "
        + (directory / f"log-{STARTS_MAX - 1}").read_text(errors="replace")[-2000:]
    )


@contextmanager
def s3rver(directory: Path) -> Iterator[S3Server]:
    """s3rver of npm, which ignores If-None-Match, with its data in ``directory``.

    Raises:
        FileNotFoundError: `ci/npm` has not installed it.
    """
    program = Path(sys.prefix) / "npm" / "node_modules" / ".bin" / "s3rver"
    program = program.resolve(strict=True)
    port = _port()
    arguments = ["-d", str(directory), "-a", "127.0.0.1", "-p", str(port), "--no-vhost-buckets"]
    node = shutil.which("node")
    if node is None:
        raise FileNotFoundError("node")
    command = [node, str(program), *arguments, "--configure-bucket", BUCKET]
    process = _start(command, directory / "log", {})
    server = S3Server(endpoint=f"http://127.0.0.1:{port}", key="S3RVER")
    try:
        if not _is_up(server, process):
            raise RuntimeError((directory / "log").read_text(errors="replace")[-2000:])
        yield server
    finally:
        process.kill()
        process.wait()


def _start(command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A process that ends with this one; its output is appended to ``log``."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-c", _DIE_WITH_PARENT, str(os.getpid()), *command],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


# prctl(PR_SET_PDEATHSIG, SIGKILL), kept by exec.
_DIE_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def _arguments(data: Path, ports: list[int]) -> list[str]:
    s3, master, filer, volume = ports
    return [
        "-logtostderr",
        "mini",
        f"-dir={data}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-s3.port={s3}",
        f"-master.port={master}",
        f"-filer.port={filer}",
        f"-volume.port={volume}",
        f"-filer.localSocket={data}/s",
        f"-bucket={BUCKET}",
        "-admin.ui=false",
        "-webdav=false",
        "-master.telemetry=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
    ]


def _port() -> int:
    """A free port whose companion for gRPC, 10,000 above, is free as well."""
    while True:
        port = random.SystemRandom().randrange(20000, 45000)
        with suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 10000))
            return port


def _is_up(server: S3Server, process: subprocess.Popen[bytes]) -> bool:
    client = server.client()
    deadline = time.monotonic() + UP_WITHIN_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            client.put_object(Bucket=BUCKET, Key="up", Body=b"1")
            client.delete_object(Bucket=BUCKET, Key="up")
            return True
        except (BotoCoreError, ClientError):
            time.sleep(0.05)
    return False
