"""Where in the user's program a call comes from, found in about a microsecond.

Guarantees: the innermost frame that is neither torch's nor of this package, as ``file:line`` and
function; one object for one place, so places compare by identity. A call that no Python frame of
the program stands behind, as from a thread of autograd, has the place `NOWHERE`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import torch

_OURS = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_STANDARD = str(Path(sys.modules["contextlib"].__file__ or "").parent) + "/contextlib.py"


@dataclass(frozen=True, eq=False)
class CallSite:
    """A line of the program."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" if self.file else "a thread of torch"


NOWHERE = CallSite("", 0, "")

hidden_files: dict[str, bool] = {}
known_sites: dict[tuple[int, int], CallSite] = {}
_kept: list[CodeType] = []
"""Code that is a key by its address must not be freed."""


def call_site(depth: int) -> CallSite:
    """The place that the caller ``depth`` frames up was called from."""
    frame = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        hidden = hidden_files.get(code.co_filename)
        if hidden is None:
            hidden = hidden_files[code.co_filename] = _hides(code.co_filename)
        if not hidden:
            # Hashing a code object takes longer than all the rest.
            key = (id(code), frame.f_lasti)
            site = known_sites.get(key)
            if site is None:
                _kept.append(code)
                site = CallSite(code.co_filename, frame.f_lineno, code.co_name)
                site = known_sites[key] = _unique.setdefault(str(site), site)
            return site
        frame = frame.f_back  # type: ignore[assignment]
    return NOWHERE


_unique: dict[str, CallSite] = {}


def _hides(file: str) -> bool:
    return file.startswith((_TORCH, _OURS)) or file == _STANDARD
