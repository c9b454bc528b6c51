"""Writing one object to S3: at once if it is small, else in parts, a few under way at a time.

Guarantees: the object is there, whole, when `finish` returned, or not at all; at most
`PARTS_UNDER_WAY` + 1 parts are held in memory, whatever the size; when `finish` or `abort` returns,
no thread works any more. A completion whose reply was lost is recognised by the object.

Does not: survive a kill; what was uploaded then is an unfinished upload, which the store collects.
Torch-free; called by `seatrial.recovery.storage.s3`.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from .protocol import Buffer
from .s3_client import S3Client

__all__ = ["S3Sink"]

PART_BYTES = 32 << 20
PARTS_UNDER_WAY = 4
_PARTS_MAX = 10_000


class S3Sink:
    """The object ``name`` of ``size_bytes``, written in the order of its bytes."""

    threads: int | None = 1
    fsyncs = False

    def __init__(self, client: S3Client, name: str, size_bytes: int) -> None:
        self._client = client
        self._name = name
        self._size_bytes = size_bytes
        self._part_bytes = max(PART_BYTES, -(-size_bytes // _PARTS_MAX))
        self._buffer = bytearray()
        self._position = 0
        self._upload: str | None = None
        self._parts: list[Future[dict[str, object]]] = []
        self._pool: ThreadPoolExecutor | None = None
        self._free = threading.Semaphore(PARTS_UNDER_WAY)

    def write_at(self, data: Buffer, offset: int) -> None:
        if offset != self._position:
            raise ValueError(f"{self._name} is written in order: {offset} after {self._position}")
        rest = memoryview(data)
        self._position += len(rest)
        while rest:
            room = self._part_bytes - len(self._buffer)
            self._buffer += rest[:room]
            rest = rest[room:]
            # The last part, or all of a small object, is for `finish`.
            if rest and len(self._buffer) == self._part_bytes:
                self._send_part()

    def _send_part(self) -> None:
        if self._upload is None:
            answer = self._client.call("create_multipart_upload", self._name)
            self._upload = str(answer["UploadId"])
            self._pool = ThreadPoolExecutor(PARTS_UNDER_WAY, "seatrial-upload")
        assert self._pool is not None
        for part in self._parts:
            if part.done():
                part.result()  # raises what failed, before more is sent
        content, self._buffer = self._buffer, bytearray()
        number = len(self._parts) + 1
        self._free.acquire()
        self._parts.append(self._pool.submit(self._send, content, number, self._upload))

    def _send(self, content: bytearray, number: int, upload: str) -> dict[str, object]:
        try:
            answer = self._client.call(
                "upload_part", self._name, UploadId=upload, PartNumber=number, Body=bytes(content)
            )
        finally:
            self._free.release()
        sums = {key: value for key, value in answer.items() if key.startswith("Checksum")}
        sums.pop("ChecksumType", None)
        return {"PartNumber": number, "ETag": answer["ETag"], **sums}

    def finish(self) -> None:
        if self._position != self._size_bytes:
            raise OSError(
                f"{self._client.url}/{self._name} has {self._position} bytes instead of "
                f"{self._size_bytes}"
            )
        if self._upload is None:
            self._client.call("put_object", self._name, Body=bytes(self._buffer))
            self._buffer = bytearray()
            return
        self._send_part()
        parts = [part.result() for part in self._parts]
        try:
            self._client.call(
                "complete_multipart_upload",
                self._name,
                UploadId=self._upload,
                MultipartUpload={"Parts": parts},
            )
        except FileNotFoundError:
            # An earlier try completed it and its reply was lost; else this raises as well.
            answer = self._client.call("head_object", self._name)
            if answer["ContentLength"] != self._size_bytes:
                raise
        self._upload = None
        self._close()

    def fsync(self) -> None:
        pass

    def abort(self) -> None:
        self._close()
        if self._upload is not None:
            with suppress(OSError):
                self._client.call("abort_multipart_upload", self._name, UploadId=self._upload)

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
