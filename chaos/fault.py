"""What goes wrong, on which rank, at which event: one fault as a value and as one line of text.

Guarantees: ``Fault.parse(str(fault)) == fault``. A trigger counts matching events per rank within
one attempt and never looks at a clock. Does not act; `seatrial.chaos.inject` does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

from .errors import FaultSyntaxError
from .events import RECORD, At

When = Literal["before", "after"]


@dataclass(frozen=True)
class Action:
    """One kind of fault: what it does, and which options besides the common ones it takes."""

    name: str
    meaning: str
    options: tuple[str, ...] = ()


ACTIONS = {
    action.name: action
    for action in (
        Action("kill", "SIGKILL: the process is gone at once"),
        Action("stop", "SIGSTOP: the process freezes; resume=SECONDS continues it", ("resume",)),
        Action("terminate", "SIGTERM, then SIGKILL after grace=SECONDS: a preemption", ("grace",)),
        Action("exit", "the process leaves with code=N and no clean-up", ("code",)),
        Action("raise", "an exception is thrown into the job"),
        Action("delay", "the rank waits for seconds=SECONDS: a slow shard of data", ("seconds",)),
        Action(
            "spoil",
            "one bit of the record flips that the rank has read; record=N only of that one",
            ("record",),
        ),
        Action("oom", "memory runs out: RLIMIT_AS is lowered and exhausted"),
        Action("tear", "the rank's file in the newest checkpoint loses its second half", ("part",)),
        Action("flip", "one bit of the rank's file in the newest checkpoint flips", ("part",)),
        Action("remove", "the rank's file in the newest checkpoint disappears", ("part",)),
    )
}
"""Every action by name; ``tear``, ``flip`` and ``remove`` damage storage, ``spoil`` the data."""

DAMAGE = ("tear", "flip", "remove")
PARTS = ("shard", "objects", "manifest")
OPTIONS = ("code", "grace", "resume", "part", "seconds", "record")
"""Options of single actions."""


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
        part: which file ``tear``, ``flip`` and ``remove`` damage, one of `PARTS`.
        seconds: how long ``delay`` waits.
        record: the only record that ``spoil`` counts, by number; any if None.
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
    seconds: float = 1.0
    record: int | None = None

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise FaultSyntaxError(
                f"unknown fault {self.action!r}; the faults are {', '.join(ACTIONS)}"
            )
        if (self.rank is not None) + (self.node is not None) + self.everyone != 1:
            raise FaultSyntaxError(f"{self.action}: say whom: rank=N, rank=* or node=N")
        allowed = ACTIONS[self.action].options
        for option in OPTIONS:
            if option not in allowed and getattr(self, option) != _DEFAULTS[option]:
                takes = ", ".join(allowed) or "no option of its own"
                raise FaultSyntaxError(f"{self.action} does not take {option}=; it takes {takes}")
        if self.part not in PARTS:
            raise FaultSyntaxError(f"part={self.part!r}: choose one of {', '.join(PARTS)}")
        if min(self.rank or 0, self.node or 0) < 0:
            raise FaultSyntaxError(f"{self.whom}: ranks and nodes count from 0")
        if self.when not in ("before", "after"):
            raise FaultSyntaxError(f"when={self.when!r} should be 'before' or 'after'")
        if self.action == "spoil" and (self.when, self.at.name) != ("before", RECORD):
            raise FaultSyntaxError(f"spoil strikes before at={RECORD}, where a record is in hand")
        for option, seconds in (
            ("grace", self.grace), ("resume", self.resume or 0.0), ("seconds", self.seconds)
        ):  # fmt: skip
            if not (seconds >= 0 and math.isfinite(seconds)):
                raise FaultSyntaxError(f"{option}={seconds} should be a number of seconds")
        if self.nth < 1 or (self.attempt is not None and self.attempt < 1):
            raise FaultSyntaxError("nth= and attempt= count from 1")
        if not 1 <= self.code <= 255:
            raise FaultSyntaxError(f"code={self.code}: an exit code of a failure is 1 to 255")

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
        for name in ("nth", "when", "attempt", "persistent", *OPTIONS):
            value = getattr(self, name)
            if value != _DEFAULTS[name]:
                words.append(f"{name}={_show(value)}")
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
        words += [f"seconds{self.seconds:g}"] if self.seconds != _DEFAULTS["seconds"] else []
        words += [f"record{self.record}"] if self.record is not None else []
        return "-".join(words)

    @property
    def is_in_the_data(self) -> bool:
        """Whether this is no accident of a run, but a record that is damaged for good."""
        counts = self.nth > 1 or self.attempt is not None
        return self.action == "spoil" and self.persistent and not counts

    def targets(self, *, world_size: int, ranks_per_node: int) -> tuple[int, ...]:
        """The ranks that the fault strikes."""
        if self.rank is not None:
            return (self.rank,) if self.rank < world_size else ()
        ranks = range(world_size)
        if self.everyone:
            return tuple(ranks)
        return tuple(rank for rank in ranks if rank // ranks_per_node == self.node)


_DEFAULTS = {field.name: field.default for field in fields(Fault)}


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
    "seconds": _seconds,
    "record": _count,
}


def _read(text: str, word: str, key: str, value: str) -> object:
    try:
        return _READERS[key](value)
    except FaultSyntaxError as error:
        raise FaultSyntaxError(f"fault {text!r}: {error}") from None
    except ValueError as error:
        raise FaultSyntaxError(f"fault {text!r}: {word!r} should be {error}") from None


def _show(value: object) -> str:
    if value is True:
        return "yes"
    return repr(value) if isinstance(value, float) else str(value)
