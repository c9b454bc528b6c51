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

from .actions import ACTIONS, ALWAYS, BENDING, CHOICES, NETWORK, OWN_OPTIONS
from .errors import FaultSyntaxError
from .events import COLLECTIVE, RECORD, STORAGE, At
from .powerloss.volatile import Survives

When = Literal["before", "after"]


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
        path: count only operations on files whose full name matches this pattern.
        group: count only collectives of groups whose description, or name, matches this pattern.
        code: exit status of ``exit``, 1 to 255.
        grace: seconds between the SIGTERM and the SIGKILL of ``terminate``.
        resume: seconds after which ``stop`` continues the process; never if None.
        part: which file ``tear``, ``flip``, … damage, one of `PARTS`.
        survives: what ``powercut`` leaves of what was not durable; see `Survives`.
        record: the only record that ``spoil`` counts, by number; any if None.
        times: how many matches in a row an operation is altered, from the nth; `ALWAYS`: all that
            follow.
        error: what ``fail`` raises, a key of `ERRORS`.
        keep: how many bytes ``short`` lets through; half of them if None.
        hold: after how many other operations of the rank ``late`` carries its own out.
        seconds: how long ``delay`` lasts, above 0; with ``tail``, at least.
        tail: exponent of a Pareto distribution from which the seed draws the delay.
        rate: bytes per second that ``slow`` and ``throttle`` allow.
        across: ``reorder`` with the next call of another group, not of the same group and kind.
        size: whether the other dtype of ``wrong-dtype`` has the ``same`` size or an ``other``.
        of: whether ``garble`` changes the ``result`` that the rank sees, or its own ``input``.
        to: whether ``garble`` flips a ``bit`` of the element or makes it ``nan`` or ``inf``.
        way: what a ``partition`` loses of the host's packets: ``both`` ways, what goes ``out``, or
            what comes ``in``.
        heal: seconds after which it is over, above 0; with the attempt if None.
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
    path: str = "*"
    group: str | None = None
    code: int = 1
    grace: float = 30.0
    resume: float | None = None
    part: str = "shard"
    survives: Survives = "certain"
    record: int | None = None
    times: int = 1
    error: str = "EIO"
    keep: int | None = None
    hold: int = 1
    seconds: float = 1.0
    tail: float | None = None
    rate: float = 1e6
    across: bool = False
    size: str = "same"
    of: str = "result"
    to: str = "bit"
    way: str = "both"
    heal: float | None = None

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise FaultSyntaxError(
                f"unknown fault {self.action!r}; the faults are {', '.join(ACTIONS)}"
            )
        if (self.rank is not None) + (self.node is not None) + self.everyone != 1:
            raise FaultSyntaxError(f"{self.action}: say whom: rank=N, rank=* or node=N")
        allowed = ACTIONS[self.action].options
        for option in OWN_OPTIONS:
            if option not in allowed and getattr(self, option) != _DEFAULTS[option]:
                takes = ", ".join(allowed) or "no option of its own"
                raise FaultSyntaxError(f"{self.action} does not take {option}=; it takes {takes}")
        for option, choices in CHOICES.items():
            if getattr(self, option) not in choices:
                said = f"{option}={getattr(self, option)!r}"
                raise FaultSyntaxError(f"{said}: choose one of {', '.join(choices)}")
        if min(self.rank or 0, self.node or 0) < 0:
            raise FaultSyntaxError(f"{self.whom}: ranks and nodes count from 0")
        if self.when not in ("before", "after"):
            raise FaultSyntaxError(f"when={self.when!r} should be 'before' or 'after'")
        for option in ("grace", "resume", "seconds"):
            seconds = getattr(self, option) or 0.0
            if not (seconds >= 0 and math.isfinite(seconds)):
                raise FaultSyntaxError(f"{option}={seconds} should be a number of seconds")
        if self.action == "delay" and not self.seconds:
            raise FaultSyntaxError("seconds=0 delays nothing: it should be above 0")
        for option in ("rate", "tail", "heal"):
            value = getattr(self, option)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise FaultSyntaxError(f"{option}={value} should be a number above 0")
        if self.nth < 1 or (self.attempt is not None and self.attempt < 1):
            raise FaultSyntaxError("nth= and attempt= count from 1")
        if not 1 <= self.code <= 255:
            raise FaultSyntaxError(f"code={self.code}: an exit code of a failure is 1 to 255")
        self._check_operation()
        self._check_place()

    def _check_operation(self) -> None:
        """What concerns operations of the storage."""
        able = ACTIONS[self.action].operations
        reached = [event.name.removeprefix(STORAGE) for event in self.at.events()]
        if self.action == "delay" and not self.at.is_storage:
            if self.times != 1:
                raise FaultSyntaxError(f"times= counts operations of the storage: at={STORAGE}…")
        elif able and not (self.at.is_storage and set(able) & set(reached)):
            where = ", ".join(STORAGE + name for name in able)
            raise FaultSyntaxError(f"{self.action} alters {where}, and not {self.at.name}")
        if self.when == "after" and self.alters_storage and self.action != "fail":
            raise FaultSyntaxError(f"{self.action} changes the operation itself: leave out when=")
        if self.times < 0 or self.hold < 1 or (self.keep or 0) < 0:
            raise FaultSyntaxError("times= and hold= count from 1, keep= from 0")

    def _check_place(self) -> None:
        """What an action needs of the place where it strikes."""
        if self.path != "*" and not self.at.is_storage:
            raise FaultSyntaxError(
                f"path={self.path} selects operations: use it with at={STORAGE}…"
            )
        if not self.path or re.search(r"[\s;]", self.path):
            raise FaultSyntaxError("path= is a pattern without spaces, such as *manifest*")
        if self.group is not None:
            if re.search(r"[\s;]", self.group) or not self.group:
                raise FaultSyntaxError(f"group={self.group!r} has no name, or a space or ';' in it")
            if not self.concerns_collectives:
                raise FaultSyntaxError(f"group= is of collectives, and at={self.at} is none")
        if self.action == "swap" and self.part == "manifest":
            raise FaultSyntaxError("swap: the manifest is one file for all ranks")
        if self.action == "powercut" and self.rank is not None:
            raise FaultSyntaxError("powercut strikes a whole machine: say rank=* or node=N")
        if self.action in NETWORK and self.node is None:
            raise FaultSyntaxError(f"{self.action} strikes a whole host: say node=N")
        if self.action == "spoil" and (self.when, self.at.name) != ("before", RECORD):
            raise FaultSyntaxError(f"spoil strikes before at={RECORD}, where a record is in hand")
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
        for name in ("path", "group", "nth", "when", "attempt", "persistent", *OWN_OPTIONS):
            value = getattr(self, name)
            if value != _DEFAULTS[name]:
                words.append(f"{name}={_show(name, value)}")
        return " ".join(words)

    @property
    def alters_storage(self) -> bool:
        """Whether it changes what an operation of the storage does."""
        return bool(ACTIONS[self.action].operations) and self.at.is_storage

    @property
    def concerns_collectives(self) -> bool:
        """Whether it can strike at a collective or a message."""
        return self.action in BENDING or self.at.name.startswith(COLLECTIVE)

    @property
    def is_in_the_data(self) -> bool:
        """Whether this is no accident of a run, but a record that is damaged for good."""
        counts = self.nth > 1 or self.attempt is not None
        return self.action == "spoil" and self.persistent and not counts

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
        words += [re.sub(r"[^\w.-]", "", self.path) or "any"] if self.path != "*" else []
        words += [re.sub(r"\W+", "_", f"in{self.group}")] if self.group is not None else []
        for name in OWN_OPTIONS:
            value = getattr(self, name)
            if value != _DEFAULTS[name]:
                shown = f"{value:g}" if isinstance(value, float) else _show(name, value)
                shown = "" if value is True else shown
                words.append(shown if name in ("part", "survives", "error") else f"{name}{shown}")
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
    "path": str,
    "group": str,
    "code": _count,
    "grace": _seconds,
    "resume": _seconds,
    "part": str,
    "survives": str,
    "record": _count,
    "times": _times,
    "error": str,
    "keep": _count,
    "hold": _count,
    "seconds": _seconds,
    "tail": _seconds,
    "rate": _seconds,
    "across": _yes,
    "size": str,
    "of": str,
    "to": str,
    "way": str,
    "heal": _seconds,
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
