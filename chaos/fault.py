"""What goes wrong, on which rank, at which event: one fault as a value and as one line of text.

Guarantees: ``Fault.parse(str(fault)) == fault``. A trigger counts matching events per rank within
one attempt and never looks at a clock. Does not act; `seatrial.chaos.inject` does.
"""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

from .errors import FaultSyntaxError
from .events import EVENTS, STORAGE, At
from .powerloss.volatile import SURVIVES, Survives

When = Literal["before", "after"]

CHANGES = ("write", "commit", "publish", "rename", "delete")
DATA = ("read", "write", "commit", "publish")
EVERY_OPERATION = tuple(
    event.name.removeprefix(STORAGE) for event in EVENTS if event.stage == "storage"
)
ERRORS = {
    name: getattr(errno, name)
    for name in (
        *("EIO", "ENOSPC", "EDQUOT", "EACCES", "EROFS", "ETIMEDOUT", "ESTALE", "ECONNRESET"),
    )
} | {"SlowDown": errno.EBUSY}
"""What ``fail`` may raise, by name; ``SlowDown`` is a 503 of S3, as s3fs translates it."""


@dataclass(frozen=True)
class Action:
    """One kind of fault: what it does, and which options besides the common ones it takes."""

    name: str
    meaning: str
    options: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    """The storage operations that it alters; empty for what strikes at any event."""


ACTIONS = {
    action.name: action
    for action in (
        Action("kill", "SIGKILL: the process is gone at once"),
        Action("stop", "SIGSTOP: the process freezes; resume=SECONDS continues it", ("resume",)),
        Action("terminate", "SIGTERM, then SIGKILL after grace=SECONDS: a preemption", ("grace",)),
        Action("exit", "the process leaves with code=N and no clean-up", ("code",)),
        Action("raise", "an exception is thrown into the job"),
        Action("oom", "memory runs out: RLIMIT_AS is lowered and exhausted"),
        Action("powercut", "the machine loses power: its ranks die, and what was not made durable "
               "may be lost, as survives= says", ("survives",)),
        Action("tear", "the rank's file in the newest checkpoint loses its second half", ("part",)),
        Action("flip", "one bit of the rank's file in the newest checkpoint flips", ("part",)),
        Action("remove", "the rank's file in the newest checkpoint disappears", ("part",)),
        Action("swap", "the rank's file in the newest checkpoint and the next rank's change places",
               ("part",)),
        Action("rollback", "the rank's file in the newest checkpoint becomes the previous one's",
               ("part",)),
        Action("fail", "a storage operation fails with error=NAME (when=after: it took effect)",
               ("error", "times"), EVERY_OPERATION),
        Action("lose", "a storage operation is acknowledged and never carried out",
               ("times",), CHANGES),
        Action("short", "only the first keep=BYTES of a write arrive (half of it)",
               ("keep", "times"), ("write", "commit", "publish")),
        Action("corrupt", "one bit flips on the way to or from the storage",
               ("times",), DATA),
        Action("stale", "a rank is served what it saw last, or nothing",
               ("times",), ("read", "list", "stat")),
        Action("late", "a storage operation is acknowledged, and done hold=N operations later (1)",
               ("hold", "times"), CHANGES),
        Action("delay", "a storage operation takes seconds=S longer",
               ("seconds", "times"), EVERY_OPERATION),
        Action("slow", "bytes move at rate=N a second", ("rate", "times"), DATA),
    )
}  # fmt: skip
"""Every action by name: what happens to the process, to the newest checkpoint at rest, and to
single operations of the storage."""

DAMAGE = ("tear", "flip", "remove", "swap", "rollback")
LIES = ("lose", "short", "corrupt", "stale", "late")
"""Alterations that the job is not told of."""
PARTS = ("shard", "objects", "manifest")
ALWAYS = 0
"""``times=always``."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault. Exactly one of ``rank``, ``node`` or ``everyone`` says whom it strikes.

    Attributes:
        action: a key of `ACTIONS`.
        at: the events that count.
        nth: strike at the nth matching event of the attempt, from 1.
        when: strike before the event's body runs or after it succeeded.
        attempt: count only in this attempt (from 1); in any attempt if None.
        persistent: strike at every attempt's nth match; otherwise once in the whole run.
        code: exit status of ``exit``, 1 to 255.
        grace: seconds between the SIGTERM and the SIGKILL of ``terminate``.
        resume: seconds after which ``stop`` continues the process; never if None.
        part: which file ``tear``, ``flip``, … damage, one of `PARTS`.
        survives: what ``powercut`` leaves of what was not durable; see `Survives`.
        path: count only operations on files whose full name matches this pattern.
        times: how many matches in a row it strikes, from the nth; `ALWAYS`: all that follow.
        error: what ``fail`` raises, a key of `ERRORS`.
        keep: how many bytes ``short`` lets through; half of them if None.
        hold: after how many other operations of the rank ``late`` carries its own out.
        seconds: how much longer ``delay`` makes an operation.
        rate: bytes per second that ``slow`` allows.
    """

    action: str
    at: At
    rank: int | None = None
    node: int | None = None
    everyone: bool = False
    nth: int = 1
    when: When = "before"
    attempt: int | None = None
    persistent: bool = False
    code: int = 1
    grace: float = 30.0
    resume: float | None = None
    part: str = "shard"
    survives: Survives = "certain"
    path: str = "*"
    times: int = 1
    error: str = "EIO"
    keep: int | None = None
    hold: int = 1
    seconds: float = 1.0
    rate: float = 1e6

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise FaultSyntaxError(
                f"unknown fault {self.action!r}; the faults are {', '.join(ACTIONS)}"
            )
        if (self.rank is not None) + (self.node is not None) + self.everyone != 1:
            raise FaultSyntaxError(f"{self.action}: say whom: rank=N, rank=* or node=N")
        allowed = ACTIONS[self.action].options
        for option in _OWN:
            if option not in allowed and getattr(self, option) != _DEFAULTS[option]:
                takes = ", ".join(allowed) or "no option of its own"
                raise FaultSyntaxError(f"{self.action} does not take {option}=; it takes {takes}")
        if self.part not in PARTS:
            raise FaultSyntaxError(f"part={self.part!r}: choose one of {', '.join(PARTS)}")
        if self.survives not in SURVIVES:
            raise FaultSyntaxError(
                f"survives={self.survives!r}: choose one of {', '.join(SURVIVES)}"
            )
        if self.action == "powercut" and self.rank is not None:
            raise FaultSyntaxError("powercut strikes a whole machine: say rank=* or node=N")
        if min(self.rank or 0, self.node or 0) < 0:
            raise FaultSyntaxError(f"{self.whom}: ranks and nodes count from 0")
        if self.when not in ("before", "after"):
            raise FaultSyntaxError(f"when={self.when!r} should be 'before' or 'after'")
        for option, seconds in (("grace", self.grace), ("resume", self.resume or 0.0)):
            if not (seconds >= 0 and math.isfinite(seconds)):
                raise FaultSyntaxError(f"{option}={seconds} should be a number of seconds")
        if self.nth < 1 or (self.attempt is not None and self.attempt < 1):
            raise FaultSyntaxError("nth= and attempt= count from 1")
        if not 1 <= self.code <= 255:
            raise FaultSyntaxError(f"code={self.code}: an exit code of a failure is 1 to 255")
        self._check_operation()

    def _check_operation(self) -> None:
        """What concerns operations of the storage."""
        able = ACTIONS[self.action].operations
        reached = [event.name.removeprefix(STORAGE) for event in self.at.events()]
        if able and not (self.at.is_storage and set(able) & set(reached)):
            where = ", ".join(STORAGE + name for name in able)
            raise FaultSyntaxError(f"{self.action} alters {where}, and not {self.at.name}")
        if self.path != "*" and not self.at.is_storage:
            raise FaultSyntaxError(
                f"path={self.path} selects operations: use it with at={STORAGE}…"
            )
        if not self.path or re.search(r"[\s;]", self.path):
            raise FaultSyntaxError("path= is a pattern without spaces, such as *manifest*")
        if self.when == "after" and self.action in (*LIES, "delay", "slow"):
            raise FaultSyntaxError(f"{self.action} changes the operation itself: leave out when=")
        if self.error not in ERRORS:
            raise FaultSyntaxError(f"error={self.error}: choose one of {', '.join(ERRORS)}")
        if self.action == "swap" and self.part == "manifest":
            raise FaultSyntaxError("swap: the manifest is one file for all ranks")
        if self.times < 0 or self.hold < 1 or (self.keep or 0) < 0:
            raise FaultSyntaxError("times= and hold= count from 1, keep= from 0")
        for option, value in (("seconds", self.seconds), ("rate", self.rate)):
            if not (value > 0 and math.isfinite(value)):
                raise FaultSyntaxError(f"{option}={value} should be above 0")

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read one fault, for example ``kill rank=1 at=step:12/backward when=after``.

        Raises:
            FaultSyntaxError: with the word that is wrong and what may stand there.
        """
        action, *words = text.split() or [""]
        values: dict[str, object] = {}
        for word in words:
            key, equals, value = word.partition("=")
            if not equals or key not in _READERS:
                raise FaultSyntaxError(
                    f"fault {text!r}: {word!r} is not an option; write KEY=VALUE with a key of "
                    f"{', '.join(_READERS)}"
                )
            if key in values:
                raise FaultSyntaxError(f"fault {text!r} says {key}= twice")
            values[key] = _read(text, word, key, value)
        if values.get("rank") == "*":
            del values["rank"]
            values["everyone"] = True
        if "at" not in values:
            raise FaultSyntaxError(f"fault {text!r} does not say where: at=step:12/backward")
        try:
            return cls(action=action, **values)  # type: ignore[arg-type]
        except FaultSyntaxError as error:
            raise FaultSyntaxError(f"fault {text!r}: {error}") from None

    def __str__(self) -> str:
        words = [self.action, self.whom, f"at={self.at}"]
        for name in ("path", "nth", "when", "attempt", "persistent", *_OWN):
            value = getattr(self, name)
            if value != _DEFAULTS[name]:
                words.append(f"{name}={_show(name, value)}")
        return " ".join(words)

    @property
    def whom(self) -> str:
        """``rank=1``, ``rank=*`` or ``node=0``."""
        if self.node is not None:
            return f"node={self.node}"
        return f"rank={'*' if self.everyone else self.rank}"

    @property
    def label(self) -> str:
        """A short identifier for test names, such as ``rank1-step12-backward``."""
        whom = "all" if self.everyone else self.whom.replace("=", "")
        words = [whom, str(self.at).replace(":", "").replace("/", "-").replace("*", "any")]
        words += ["after"] if self.when == "after" else []
        words += [f"nth{self.nth}"] if self.nth > 1 else []
        words += [f"attempt{self.attempt}"] if self.attempt else []
        words += ["persistent"] if self.persistent else []
        words += [f"code{self.code}"] if self.code != _DEFAULTS["code"] else []
        words += [f"grace{self.grace:g}"] if self.grace != _DEFAULTS["grace"] else []
        words += [f"resume{self.resume:g}"] if self.resume is not None else []
        words += [self.part] if self.action in DAMAGE and self.part != "shard" else []
        words += [self.survives] if self.survives != _DEFAULTS["survives"] else []
        for name in ("path", *_OWN[5:]):
            value = getattr(self, name)
            if value != _DEFAULTS[name]:
                shown = re.sub(r"[^\w.-]", "", str(value)) if name == "path" else _show(name, value)
                words.append((shown or "any") if name in ("error", "path") else f"{name}{shown}")
        return "-".join(words)

    def targets(self, *, world_size: int, ranks_per_node: int) -> tuple[int, ...]:
        """The ranks that the fault strikes."""
        if self.rank is not None:
            return (self.rank,) if self.rank < world_size else ()
        ranks = range(world_size)
        if self.everyone:
            return tuple(ranks)
        return tuple(rank for rank in ranks if rank // ranks_per_node == self.node)


_DEFAULTS = {field.name: field.default for field in fields(Fault)}
_OWN = (
    *("code", "grace", "resume", "part", "survives"),
    *("times", "error", "keep", "hold", "seconds", "rate"),
)
"""Options that only some actions take."""


def _count(text: str) -> int:
    if not re.fullmatch(r"\d+", text):
        raise ValueError("a whole number")
    return int(text)


def _rank(text: str) -> int | str:
    return text if text == "*" else _count(text)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?(e[-+]?\d+)?s?", text):
        raise ValueError("a number of seconds")
    return float(text.removesuffix("s"))


def _times(text: str) -> int:
    if text != "always" and not _count(text):
        raise ValueError("a whole number from 1, or 'always'")
    return ALWAYS if text == "always" else _count(text)


def _when(text: str) -> str:
    if text not in ("before", "after"):
        raise ValueError("'before' or 'after'")
    return text


def _yes(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError("'yes' or 'no'")
    return text == "yes"


_READERS: dict[str, Callable[[str], object]] = {
    "rank": _rank,
    "node": _count,
    "at": At.parse,
    "nth": _count,
    "when": _when,
    "attempt": _count,
    "persistent": _yes,
    "code": _count,
    "grace": _seconds,
    "resume": _seconds,
    "part": str,
    "survives": str,
    "path": str,
    "times": _times,
    "error": str,
    "keep": _count,
    "hold": _count,
    "seconds": _seconds,
    "rate": _seconds,
}


def _read(text: str, word: str, key: str, value: str) -> object:
    try:
        return _READERS[key](value)
    except FaultSyntaxError as error:
        raise FaultSyntaxError(f"fault {text!r}: {error}") from None
    except ValueError as error:
        raise FaultSyntaxError(f"fault {text!r}: {word!r} should be {error}") from None


def _show(option: str, value: object) -> str:
    if option == "times" and value == ALWAYS:
        return "always"
    if value is True:
        return "yes"
    return repr(value) if isinstance(value, float) else str(value)
