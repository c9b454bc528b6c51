"""Options of storage for programs that are told them in words, and the secrets among them.

    --option endpoint_url=https://minio:9000 --option secret=env:MINIO_SECRET
    --option config_kwargs.s3.addressing_style=path --option use_ssl=false

A dot leads into a dictionary; what reads as JSON (a number, true, false, null, a list, an object)
is that, and anything else is text, as are secrets always. ``env:NAME`` stands for the environment
variable NAME. The result is what fsspec's file systems take as ``storage_options``.

`offered` hands options to whoever opens a store at or below one URL without any, in this process
and its children: a job that is on trial needs not be told of them.

Guarantees: a secret in the clear is refused, so what was given may be printed and stored; a
variable's value is looked up when the storage is opened, is in no message, and shows as ``***`` in
a traceback.

Does not: read fsspec's own configuration; fsspec does, and what is given here comes before it.
Torch-free; called by `open_storage`, the command line and the plugin.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import CheckpointError
from .secret import Secret, has_secret, is_secret_name

__all__ = ["offered", "offered_options", "parse_options", "resolved_options"]

_ENVIRONMENT = "SEATRIAL_STORAGE_OPTIONS"
_VARIABLE = "env:"
_IS_VARIABLE = re.compile(r"env:[A-Za-z_]\w*")


def parse_options(texts: Sequence[str]) -> dict[str, object]:
    """The options that ``texts``, each ``KEY=VALUE``, say; variables are not looked up.

    Raises:
        CheckpointError: which text cannot be used, and why. It names no secret.
    """
    options: dict[str, object] = {}
    for number, text in enumerate(texts, 1):
        key, equals, value = text.partition("=")
        parts = key.split(".")
        if not equals or not all(part.isidentifier() for part in parts):
            # Without the text, which may be a secret.
            raise CheckpointError(
                f"option {number} of {len(texts)} is not KEY=VALUE, such as "
                "endpoint_url=https://host or client_kwargs.region_name=eu-west-1"
            )
        read = _read(value)
        if any(map(is_secret_name, parts)) and not (read is None or isinstance(read, bool)):
            read = value
        _refuse_secrets(key, parts, read)
        held = options
        for part in parts[:-1]:
            inner = held.setdefault(part, {})
            if not isinstance(inner, dict):
                raise CheckpointError(f"{key}: {part} was given a value before")
            held = inner
        if parts[-1] in held:
            raise CheckpointError(f"{key} was given twice")
        held[parts[-1]] = read
    return options


def _read(value: str) -> object:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _refuse_secrets(key: str, path: Sequence[str], value: object) -> None:
    if isinstance(value, dict):
        for name, inner in value.items():
            _refuse_secrets(f"{key}.{name}", [*path, str(name)], inner)
    elif isinstance(value, list):
        for inner in value:
            _refuse_secrets(key, path, inner)
    elif value is not None and not isinstance(value, bool):  # a number may be a secret, these not
        is_secret = any(map(is_secret_name, path)) or has_secret(str(value))
        if is_secret and not _IS_VARIABLE.fullmatch(str(value)):
            raise CheckpointError(
                f"{key} is a secret, which others can read on a command line and in reports; put "
                f"it into an environment variable and give {key}=env:NAME"
            )


def resolved_options(options: Mapping[str, object]) -> dict[str, object]:
    """``options`` with the values of the variables that they name, each as a `Secret`.

    Raises:
        CheckpointError: a variable is not set.
    """
    return {key: _resolved(key, value) for key, value in options.items()}


def _resolved(key: str, value: object) -> Any:
    if isinstance(value, Mapping):
        return {name: _resolved(f"{key}.{name}", inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_resolved(key, inner) for inner in value]
    if isinstance(value, str) and value.startswith(_VARIABLE):
        name = value.removeprefix(_VARIABLE)
        if name not in os.environ:
            raise CheckpointError(
                f"the option {key} of the storage is the environment variable {name!r}, which is "
                "not set"
            )
        return Secret(os.environ[name])
    return value


@contextmanager
def offered(url: str, options: Mapping[str, object]) -> Iterator[None]:
    """Offer ``options``, of `parse_options`, to stores at and below ``url``, in children too."""
    before = os.environ.get(_ENVIRONMENT)
    os.environ[_ENVIRONMENT] = json.dumps(_all_offered() | {url.rstrip("/"): dict(options)})
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_ENVIRONMENT, None)
        else:
            os.environ[_ENVIRONMENT] = before


def offered_options(url: str) -> dict[str, object]:
    """What is offered for the store at ``url``: that of the longest URL above it, or nothing.

    Raises:
        CheckpointError: a variable that they name is not set.
    """
    above = [u for u in _all_offered() if url == u or url.startswith(f"{u}/")]
    return resolved_options(_all_offered()[max(above, key=len)]) if above else {}


def _all_offered() -> dict[str, dict[str, object]]:
    text = os.environ.get(_ENVIRONMENT) or "{}"
    try:
        found = json.loads(text)
        return {str(url): dict(options) for url, options in found.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"the environment variable {_ENVIRONMENT} is no JSON object of options by URL; unset it"
        ) from error
