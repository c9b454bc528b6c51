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
from .events import At

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
        Action("oom", "memory runs out: RLIMIT_AS is lowered and exhausted"),
        Action("tear", "the rank's file in the newest checkpoint loses its second half", ("part",)),
        Action("flip", "one bit of the rank's file in the newest checkpoint flips", ("part",)),
        Action("remove", "the rank's file in the newest checkpoint disappears", ("part",)),
        Action("swap", "a call is made after the next one of its kind", ("across",)),
        Action("skip", "a call is not made, and its tensors stay as they are"),
        Action("duplicate", "a call is made twice"),
        Action("wrong-shape", "a call is made with another number of elements"),
        Action("wrong-dtype", "a call is made with another dtype", ("size",)),
        Action("wrong-reduction", "a call is made with another reduction"),
        Action("wrong-root", "a call is made with the next rank as its root"),
        Action("wrong-group", "a call is made in another group of the rank"),
        Action("corrupt", "one element of what a call carries changes", ("of", "to")),
        Action("delay", "a call is made late", ("seconds", "tail")),
        Action("drop", "a call is not made, and whoever waits for it waits for ever"),
    )
}
"""Every action by name; ``tear``, ``flip`` and ``remove`` damage storage, those from ``swap`` on a
collective or a message, the rest the process."""

DAMAGE = ("tear", "flip", "remove")
BENDING = tuple(list(ACTIONS)[list(ACTIONS).index("swap") :])
"""Actions on a collective or a message."""

PARTS = ("shard", "objects", "manifest")
_CHOICES = {
    "part": PARTS,
    "size": ("same", "other"),
    "of": ("result", "input"),
    "to": ("bit", "nan", "inf"),
}
_OWN_OPTIONS = tuple(dict.fromkeys(o for action in ACTIONS.values() for o in action.options))


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
        group: only collectives of groups whose description, or name, matches this pattern count.
        across: ``swap`` with the next call of another group, not of the same group and kind.
        size: whether the other dtype of ``wrong-dtype`` has the ``same`` size or an ``other``.
        of: whether ``corrupt`` changes the ``result`` that the rank sees, or its own ``input``.
        to: whether ``corrupt`` flips a ``bit`` of the element or makes it ``nan`` or ``inf``.
        seconds: how long ``delay`` lasts; with ``tail``, at least.
        tail: exponent of a Pareto distribution from which the seed draws the delay.
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
    group: str | None = None
    across: bool = False
    size: str = "same"
    of: str = "result"
    to: str = "bit"
    seconds: float = 0.3
    tail: float | None = None

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise FaultSyntaxError(
                f"unknown fault {self.action!r}; the faults are {', '.join(ACTIONS)}"
            )
        if (self.rank is not None) + (self.node is not None) + self.everyone != 1:
            raise FaultSyntaxError(f"{self.action}: say whom: rank=N, rank=* or node=N")
        allowed = ACTIONS[self.action].options
        for option in _OWN_OPTIONS:
            if option not in allowed and getattr(self, option) != _DEFAULTS[option]:
                takes = ", ".join(allowed) or "no option of its own"
                raise FaultSyntaxError(f"{self.action} does not take {option}=; it takes {takes}")
        for option, choices in _CHOICES.items():
            if getattr(self, option) not in choices:
                said = f"{option}={getattr(self, option)!r}"
                raise FaultSyntaxError(f"{said}: choose one of {', '.join(choices)}")
        self._check_collective()
        if min(self.rank or 0, self.node or 0) < 0:
            raise FaultSyntaxError(f"{self.whom}: ranks and nodes count from 0")
        if self.when not in ("before", "after"):
            raise FaultSyntaxError(f"when={self.when!r} should be 'before' or 'after'")
        for option in ("grace", "resume", "seconds"):
            seconds = getattr(self, option) or 0.0
            if not (seconds >= 0 and math.isfinite(seconds)):
                raise FaultSyntaxError(f"{option}={seconds} should be a number of seconds")
        if self.nth < 1 or (self.attempt is not None and self.attempt < 1):
            raise FaultSyntaxError("nth= and attempt= count from 1")
        if not 1 <= self.code <= 255:
            raise FaultSyntaxError(f"code={self.code}: an exit code of a failure is 1 to 255")

    def _check_collective(self) -> None:
        if self.group is not None:
            if re.search(r"[\s;]", self.group) or not self.group:
                raise FaultSyntaxError(f"group={self.group!r} has no name, or a space or ';' in it")
            if not self.concerns_collectives:
                raise FaultSyntaxError(f"group= is of collectives, and at={self.at} is none")
        if self.tail is not None and not (self.tail > 0 and math.isfinite(self.tail)):
            raise FaultSyntaxError(f"tail={self.tail} should be a number above 0")
        if self.action in BENDING and self.when == "after":
            raise FaultSyntaxError(f"{self.action} bends a call, so it strikes before it")

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
        for name in ("nth", "when", "attempt", "persistent", *_OWN_OPTIONS, "group"):
            value = getattr(self, name)
            if value != _DEFAULTS[name]:
                words.append(f"{name}={_show(value)}")
        return " ".join(words)

    @property
    def concerns_collectives(self) -> bool:
        """Whether it can strike at a collective or a message."""
        stages = (event.stage for event in self.at.events())
        return self.action in BENDING or "collective" in stages

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
        words += [re.sub(r"\W+", "_", f"in{self.group}")] if self.group is not None else []
        for name in ("across", "size", "of", "to", "seconds", "tail"):
            value = getattr(self, name)
            if value != _DEFAULTS[name]:
                shown = f"{value:g}" if isinstance(value, float) else "" if value is True else value
                words.append(f"{name}{shown}")
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
    "group": str,
    "across": _yes,
    "size": str,
    "of": str,
    "to": str,
    "seconds": _seconds,
    "tail": _seconds,
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
