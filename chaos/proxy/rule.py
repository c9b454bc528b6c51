"""What goes wrong with an HTTP request on its way, as a value and as one line of text.

Guarantees: ``HttpFault.parse(str(fault)) == fault``; a fault counts the requests that it matches,
and never looks at a clock. Does not act; `seatrial.chaos.proxy.proxy` does. Torch-free.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase

from ..actions import ALWAYS
from ..errors import FaultSyntaxError

__all__ = ["HTTP_ACTIONS", "HttpFault"]

HTTP_ACTIONS = {
    "refuse": "the server is not asked; the answer has status= and code=",
    "reset": "the server is not asked; the connection is reset",
    "lose-reply": "the request takes effect; the connection is reset instead of the answer",
    "hold": "the connection is reset, and the request lands late: when it is released",
    "slow": "the body of the answer comes at rate= bytes a second",
    "cut": "the connection is reset after keep= bytes of the answer's body",
    "flip": "one bit of the answer's body flips",
}
"""Every action, and what happens."""

_OPTIONS = {
    "refuse": ("status", "code"),
    "slow": ("rate",),
    "cut": ("keep",),
}


@dataclass(frozen=True, kw_only=True)
class HttpFault:
    """One fault of requests.

    Attributes:
        action: a key of `HTTP_ACTIONS`.
        method: of the requests that count, such as ``PUT``; any if ``*``.
        path: a pattern of the path with its query, such as ``*/manifest.json``.
        nth: strike at the nth such request, from 1.
        times: how many in a row; `ALWAYS`: all that follow.
        status: of the answer of ``refuse``.
        code: of the answer of ``refuse``, as S3 has it.
        rate: bytes per second of ``slow``.
        keep: bytes of the body that ``cut`` lets through.
    """

    action: str
    method: str = "*"
    path: str = "*"
    nth: int = 1
    times: int = 1
    status: int = 503
    code: str = "SlowDown"
    rate: float = 1e5
    keep: int = 0

    def __post_init__(self) -> None:
        if self.action not in HTTP_ACTIONS:
            raise FaultSyntaxError(
                f"unknown fault {self.action!r} of a request; they are {', '.join(HTTP_ACTIONS)}"
            )
        own = _OPTIONS.get(self.action, ())
        for option in ("status", "code", "rate", "keep"):
            if option not in own and getattr(self, option) != _DEFAULTS[option]:
                takes = ", ".join(own) or "no option of its own"
                raise FaultSyntaxError(f"{self.action} does not take {option}=; it takes {takes}")
        for option in ("method", "path", "code"):
            value = getattr(self, option)
            if not value or re.search(r"\s", value):
                raise FaultSyntaxError(f"{option}={value!r} should be one word")
        if self.nth < 1 or self.times < 0 or self.keep < 0:
            raise FaultSyntaxError("nth= and times= count from 1, keep= from 0")
        if not 400 <= self.status <= 599:
            raise FaultSyntaxError(f"status={self.status} should be 400 to 599")
        if not (self.rate > 0 and math.isfinite(self.rate)):
            raise FaultSyntaxError(f"rate={self.rate} should be above 0")

    @classmethod
    def parse(cls, text: str) -> HttpFault:
        """Read one fault, for example ``lose-reply method=PUT path=*/manifest.json``.

        Raises:
            FaultSyntaxError: with the word that is wrong.
        """
        action, *words = text.split() or [""]
        values: dict[str, object] = {}
        for word in words:
            key, equals, value = word.partition("=")
            if not equals or key not in _READERS or key in values:
                raise FaultSyntaxError(
                    f"fault {text!r}: {word!r} should be one KEY=VALUE of {', '.join(_READERS)}"
                )
            try:
                values[key] = _READERS[key](value)
            except ValueError:
                raise FaultSyntaxError(f"fault {text!r}: {word!r} should be a number") from None
        try:
            return cls(action=action, **values)  # type: ignore[arg-type]
        except FaultSyntaxError as error:
            raise FaultSyntaxError(f"fault {text!r}: {error}") from None

    def __str__(self) -> str:
        words = [self.action]
        for option in _READERS:
            value = getattr(self, option)
            if value != _DEFAULTS[option]:
                words.append(f"{option}={'always' if option == 'times' and not value else value}")
        return " ".join(words)

    def matches(self, method: str, path: str) -> bool:
        """Whether a request counts; ``path`` has its query."""
        return fnmatchcase(method, self.method) and fnmatchcase(path, self.path)

    def strikes(self, count: int) -> bool:
        """Whether it strikes at the ``count``-th request that it matches, from 1."""
        return count >= self.nth and (self.times == ALWAYS or count < self.nth + self.times)


_DEFAULTS = {field.name: field.default for field in fields(HttpFault)}


def _times(text: str) -> int:
    if text == "always":
        return ALWAYS
    if int(text) < 1:
        raise ValueError
    return int(text)


_READERS: dict[str, Callable[[str], object]] = {
    "method": str,
    "path": str,
    "nth": int,
    "times": _times,
    "status": int,
    "code": str,
    "rate": float,
    "keep": int,
}
