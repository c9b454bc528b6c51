"""A server that remembers what it is sent, and can tell whether S3 requests are signed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from object_servers import REGION


@dataclass(frozen=True)
class Arrived:
    """A request as a server received it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def is_signed_by(self, key: str, secret: str) -> bool:
        said = dict(
            part.strip().partition("=")[::2]
            for part in self.headers["Authorization"].removeprefix("AWS4-HMAC-SHA256 ").split(",")
        )
        signed = said["SignedHeaders"].split(";")
        request = AWSRequest(
            method=self.method,
            url=f"http://{self.headers['Host']}{self.path}",
            headers={name: value for name, value in self.headers.items() if name.lower() in signed},
            data=self.body,
        )
        request.context["timestamp"] = self.headers["X-Amz-Date"]
        auth = S3SigV4Auth(Credentials(key, secret), "s3", REGION)
        text = auth.string_to_sign(request, auth.canonical_request(request))
        return bool(auth.signature(text, request) == said["Signature"])


class Recorder:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.requests: list[Arrived] = []


@contextmanager
def recorder() -> Iterator[Recorder]:
    """A server that remembers what it is sent, and is content with it."""

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.requests.append(Arrived("PUT", self.path, dict(self.headers), body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        found = Recorder(listening.server_port)
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield found
        finally:
            listening.shutdown()
            thread.join()
