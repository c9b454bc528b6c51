"""An S3 bucket as a place for checkpoints: conditional PUT is what publishes.

Guarantees: `S3Objects.create` creates an object exclusively with ``If-None-Match: *``. A refusal
(412), a conflict (409), an answer that servers without a clear code give (400), and an answer that
was lost all lead to reading back: it is ours exactly if the content is. A server that ignores the
condition is refused by `S3Objects.prove`.

Does not: create buckets, or work on servers whose listings lag behind their writes. Torch-free;
made by `seatrial.recovery.storage.open_storage`.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..errors import DamagedCheckpointError, StorageUnsupportedError
from .names import PROBE_PREFIX
from .retry import is_transient, retried
from .s3_client import S3Client
from .s3_upload import S3Sink

__all__ = ["S3Objects"]

_DELETED_AT_ONCE = 1000
_REFUSED = (errno.EEXIST, errno.EBUSY, errno.EINVAL)


class S3Objects:
    """The objects below an ``s3://`` URL."""

    threads = 8

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self.client = S3Client(url, options)

    @property
    def url(self) -> str:
        return self.client.url

    def prove(self) -> None:
        name = f"{PROBE_PREFIX}{secrets.token_hex(8)}"
        try:
            self._create_probe(name, b"first")
            try:
                self._create_probe(name, b"second")
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
            if self.client.get(name, 16) != b"first":
                raise StorageUnsupportedError(
                    f"{self.url} cannot publish a checkpoint exactly once: the server ignores "
                    "If-None-Match and replaced an object; use a server with conditional writes, "
                    "such as AWS S3, MinIO or SeaweedFS"
                )
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                raise StorageUnsupportedError(
                    f"{self.url} cannot publish a checkpoint exactly once: the server refuses "
                    f"If-None-Match ({error.strerror})"
                ) from error
            raise
        finally:
            with suppress(OSError):
                self.delete([name])

    def _create_probe(self, name: str, data: bytes) -> None:
        self.client.call("put_object", name, Body=data, IfNoneMatch="*")

    def create(self, name: str, data: bytes) -> bool:
        def use() -> bool:
            try:
                self.client.call_once("put_object", name, Body=data, IfNoneMatch="*")
                return True
            except OSError as error:
                if error.errno not in _REFUSED and not is_transient(error):
                    raise
                try:
                    found = self.client.get_once(name, len(data) + 1)
                except FileNotFoundError:
                    raise error from None  # tried again if that can help
                return found == data

        return retried(use, self.client.policy)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        found: dict[str, int] = {}
        more: dict[str, object] = {}
        while True:
            page = self.client.call_bucket("list_objects_v2", prefix, **more)
            for each in page.get("Contents", []):
                found[self.client.name(each["Key"])] = int(each["Size"])
            if not page.get("IsTruncated"):
                return found
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def get(self, name: str, bytes_max: int) -> bytes:
        return self.client.get(name, bytes_max)

    def read_into(self, name: str, offset: int, target: memoryview, size_bytes: int) -> None:
        try:
            self.client.read_into(name, offset, target, size_bytes)
        except OSError as error:
            if error.errno != errno.ERANGE:
                raise
            raise DamagedCheckpointError(
                f"{self.url}/{name} ends before byte {offset}; {size_bytes} bytes were stored"
            ) from error

    def put(self, name: str, data: bytes) -> None:
        self.client.call("put_object", name, Body=data)

    def upload(self, name: str, size_bytes: int) -> S3Sink:
        return S3Sink(self.client, name, size_bytes)

    def delete(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), _DELETED_AT_ONCE):
            keys = [{"Key": self.client.key(n)} for n in names[start : start + _DELETED_AT_ONCE]]
            answer = self.client.call_plain(
                "delete_objects", Delete={"Objects": keys, "Quiet": True}
            )
            for failed in answer.get("Errors", []):
                if failed.get("Code") not in ("NoSuchKey", "NoSuchVersion"):
                    raise OSError(
                        errno.EACCES if failed.get("Code") == "AccessDenied" else errno.EINVAL,
                        f"delete_objects: {failed.get('Code')} {failed.get('Message', '')}",
                        f"{self.url}/{self.client.name(str(failed.get('Key')))}",
                    )

    def uploads(self) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        more: dict[str, object] = {}
        while True:
            page: dict[str, Any] = self.client.call_bucket("list_multipart_uploads", "", **more)
            for each in page.get("Uploads", []):
                # Not every server heeds the prefix.
                if each["Key"].startswith(self.client.key("")):
                    found.append((self.client.name(each["Key"]), each["UploadId"]))
            if not page.get("IsTruncated"):
                return found
            more = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    def abort(self, name: str, upload: str) -> None:
        with suppress(FileNotFoundError):
            self.client.call("abort_multipart_upload", name, UploadId=upload)
