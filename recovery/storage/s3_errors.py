"""What an S3 server or the way to it answered, as an `OSError` whose errno says what to do.

`seatrial.recovery.storage.retry` knows which errno is worth another try. The code in the answer
decides where it is known, else the HTTP status:

| answer | errno | tried again |
|---|---|---|
| SlowDown, ServiceUnavailable, Throttling, 503, 429 | EAGAIN | yes |
| InternalError, 500, 502, 504 and every other 5xx | EREMOTEIO | yes |
| RequestTimeout, 408, no answer in time | ETIMEDOUT | yes |
| BadDigest, IncompleteBody, XAmzContentSHA256Mismatch | EREMOTEIO | yes |
| ConditionalRequestConflict, OperationAborted, 409 | EBUSY | yes |
| the connection failed or broke | ECONNRESET | yes |
| AccessDenied, 401, 403, no credentials | EACCES | no |
| NoSuchKey, 404 | ENOENT | no |
| NoSuchBucket | ENODEV | no |
| NoSuchUpload | ENOENT | no |
| PreconditionFailed, 412 | EEXIST | no |
| InvalidRange, 416 | ERANGE | no |
| NotImplemented, 405, 501 | EOPNOTSUPP | no |
| 507 | ENOSPC | no |
| anything else, 400 | EINVAL | no |

Torch-free, and imports botocore only when there is an error to translate. Called by
`seatrial.recovery.storage.s3_client`.
"""

from __future__ import annotations

import errno

__all__ = ["as_os_error"]

_BY_CODE = {
    "SlowDown": errno.EAGAIN,
    "ServiceUnavailable": errno.EAGAIN,
    "Throttling": errno.EAGAIN,
    "ThrottlingException": errno.EAGAIN,
    "RequestLimitExceeded": errno.EAGAIN,
    "InternalError": errno.EREMOTEIO,
    "RequestTimeout": errno.ETIMEDOUT,
    "BadDigest": errno.EREMOTEIO,
    "IncompleteBody": errno.EREMOTEIO,
    "XAmzContentSHA256Mismatch": errno.EREMOTEIO,
    "ConditionalRequestConflict": errno.EBUSY,
    "OperationAborted": errno.EBUSY,
    "AccessDenied": errno.EACCES,
    "NoSuchKey": errno.ENOENT,
    "NoSuchUpload": errno.ENOENT,
    "NoSuchBucket": errno.ENODEV,
    "PreconditionFailed": errno.EEXIST,
    "InvalidRange": errno.ERANGE,
    "NotImplemented": errno.EOPNOTSUPP,
}
_BY_STATUS = {
    401: errno.EACCES,
    403: errno.EACCES,
    404: errno.ENOENT,
    405: errno.EOPNOTSUPP,
    408: errno.ETIMEDOUT,
    409: errno.EBUSY,
    412: errno.EEXIST,
    416: errno.ERANGE,
    429: errno.EAGAIN,
    501: errno.EOPNOTSUPP,
    503: errno.EAGAIN,
    507: errno.ENOSPC,
}


def as_os_error(error: Exception, what: str, place: str) -> OSError | None:
    """The `OSError` for ``error``, which ``what`` on ``place`` raised; None if it is no answer.

    ``what`` is the name of the S3 operation, ``place`` the URL.
    """
    from botocore import exceptions

    if isinstance(error, OSError) and error.errno is not None:
        return error
    number: int | None = None
    text = str(error) or type(error).__name__
    if isinstance(error, exceptions.ClientError):
        number, text = _of_answer(error.response)
    elif isinstance(
        error, (exceptions.ReadTimeoutError, exceptions.ConnectTimeoutError, TimeoutError)
    ):
        number = errno.ETIMEDOUT
    elif isinstance(error, (exceptions.NoCredentialsError, exceptions.CredentialRetrievalError)):
        number = errno.EACCES
    elif isinstance(
        error,
        (
            exceptions.HTTPClientError,
            exceptions.ConnectionError,
            exceptions.IncompleteReadError,
            OSError,
        ),
    ) or type(error).__module__.partition(".")[0] in ("aiohttp", "urllib3"):
        number = errno.ECONNRESET
    elif isinstance(error, exceptions.BotoCoreError):
        number = errno.EINVAL
    return None if number is None else OSError(number, f"{what}: {text}", place)


def _of_answer(response: object) -> tuple[int, str]:
    fields = response if isinstance(response, dict) else {}
    said = fields.get("Error", {})
    code = str(said.get("Code", ""))
    status = int(fields.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) or 0)
    if not status and code.isdigit():
        status = int(code)
    number = _BY_CODE.get(code) or _BY_STATUS.get(status)
    if number is None:
        number = errno.EREMOTEIO if status >= 500 else errno.EINVAL
    known = "" if code.isdigit() else code
    message = said.get("Message") or ""
    return number, " ".join(filter(None, (str(status or ""), known, str(message))))
