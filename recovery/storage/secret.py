"""What is a secret in options of storage and in URLs, and strings that are not shown.

Guarantees: a name or URL that looks like a secret's is taken for one; a `Secret` is the string that
it holds to every library, and ``***`` where values are represented, as in a traceback.

Does not: know a secret by its value. One that is given under a name that says nothing passes.
Torch-free; called by `seatrial.recovery.storage.options` and by whoever is given a URL in words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ..errors import CheckpointError

__all__ = ["Secret", "has_secret", "is_secret_name", "redacted", "refuse_secret_url"]

_NAME = re.compile(
    r"secret|token|passw|passphrase|^pass$|pwd|credential|private|bearer|cookie|sas_|^sig$"
    r"|auth(?!or(?!i[sz]))|connection_string|api_?key|signature(?!_version)"
    r"|(access|account|customer|encryption|shared)_?key(?!_?id)",
    re.IGNORECASE,
)
# A name without a password is a user of sftp or a container of Azure, but a token of HTTP.
_WITH_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]*@|https?://[^/@\s]+@", re.IGNORECASE)
_PARAMETER = re.compile(r"[?&;]([^=&;#\s]+)=.")


class Secret(str):
    """A secret's value, which has no representation."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


def is_secret_name(name: str) -> bool:
    """Whether what has this name is a secret."""
    return bool(_NAME.search(name))


def has_secret(url: str) -> bool:
    """Whether a password, a token or a signature stands in ``url``."""
    return bool(_WITH_PASSWORD.search(url)) or any(map(is_secret_name, _PARAMETER.findall(url)))


def refuse_secret_url(url: str) -> None:
    """Refuse a URL that was typed with a secret in it; a path is none.

    Raises:
        CheckpointError: without the URL, which others would read.
    """
    if ("://" in url or "::" in url) and has_secret(url):
        raise CheckpointError(
            "the URL has a secret in it, which others can read on a command line and in reports; "
            "leave it out, and give it as an option of the storage, such as password=env:NAME"
        )


def redacted(text: object, options: object) -> str:
    """``text`` without the secrets among ``options``."""
    said = str(text)
    if isinstance(options, Secret):
        return said.replace(str(options), "***") if options else said
    if isinstance(options, Mapping):
        options = list(options.values())
    if isinstance(options, Sequence) and not isinstance(options, str | bytes):
        for each in options:
            said = redacted(said, each)
    return said
