"""Times of whole runs, made up: every rank a little different in every step, and who is late."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from seatrial.chaos.timing.times import SPANS, StepTimes

Alters = Callable[[int, int], dict[str, float]]
"""What is added to a rank's seconds, by name; ``asleep`` to those of its backward, too."""


def run(
    alters: Alters = lambda rank, step: {},
    *,
    ranks: int = 2,
    steps: int = 14,
    seed: int = 0,
    scatter: float = 0.001,
    attempt: int = 1,
    first: int = 1,
    factor: float = 1.0,
) -> list[StepTimes]:
    """``steps`` steps of some 15 ms, times ``factor``, of which the first of an attempt takes 20
    ms longer. What one rank is longer by itself, the others wait for."""
    chance = random.Random(seed)
    made = []
    for index, step in enumerate(range(first, first + steps)):
        own = {rank: _own(chance, alters(rank, step), scatter, factor) for rank in range(ranks)}
        longest = max(sum(each["seconds"].values()) for each in own.values())
        for rank, each in own.items():
            seconds = dict(each["seconds"])
            seconds["exposed"] = 0.003 + longest - sum(seconds.values())
            seconds["forward"] += 0.02 * (index == 0)
            made.append(
                StepTimes(
                    attempt=attempt,
                    rank=rank,
                    step=step,
                    index=index,
                    asleep={name: each["asleep"] * (name == "backward") for name in SPANS},
                    **_ZEROS | seconds | {"starved": each["starved"]},
                )
            )
    return made


_ZEROS = dict.fromkeys(("overlapped", "starved", "check", "check_waited"), 0.0)
_USUAL = {"data": 0.001, "forward": 0.004, "backward": 0.006, "optimizer": 0.002}


def _own(
    chance: random.Random, added: dict[str, float], scatter: float, factor: float
) -> dict[str, Any]:
    seconds = {"other": 0.0002, "idle": 0.0}
    for name, usual in _USUAL.items():
        seconds[name] = factor * (usual + abs(chance.gauss(0.0, scatter))) + added.get(name, 0.0)
    seconds["backward"] += added.get("asleep", 0.0)
    return {
        "seconds": seconds,
        "asleep": added.get("asleep", 0.0),
        "starved": added.get("starved", 0.0),
    }
