"""The questions of the suite about single objects: who sees what, and when.

Torch-free; asked by `seatrial.chaos.certify.suite`.
"""

from __future__ import annotations

import threading
from secrets import token_bytes

from .certificate import Outcome
from .subject import GET_MAX, RACERS, Answer, Guarantee, Subject, at_once

__all__ = ["GUARANTEES"]

RACES = 5
ROUNDS = 10
LARGE_BYTES = 2 << 20


def exclusive_publish(subject: Subject) -> Answer:
    for number in range(RACES):
        name = f"race-{number}"
        won = at_once(lambda racer, name=name: subject.names.create(name, b"racer %d" % racer))  # type: ignore[misc]
        winners = [racer for racer, result in enumerate(won) if result is True]
        errors = [result for result in won if isinstance(result, Exception)]
        content = subject.second.get(name, 100).decode(errors="replace")
        if errors:
            return Outcome.BROKEN, f"a racer failed: {type(errors[0]).__name__}: {errors[0]}"
        if len(winners) != 1 or content != f"racer {winners[0]}":
            return Outcome.BROKEN, (
                f"in race {number + 1} racers {winners} of {RACERS} were told that they created "
                f"{name!r}, and it holds what {content!r} wrote"
            )
    return Outcome.KEPT, f"{RACES} races of {RACERS}: one winner each, whose bytes are there"


def read_after_write(subject: Subject) -> Answer:
    for number in range(ROUNDS):
        name, content = f"new-{number}", token_bytes(100)
        subject.names.put(name, content)
        try:
            found = subject.second.get(name, 200)
        except FileNotFoundError:
            return Outcome.BROKEN, f"{name!r} was acknowledged and is not there"
        if found != content:
            return Outcome.BROKEN, f"{name!r} was acknowledged and holds something else"
    return Outcome.KEPT, f"{ROUNDS} of {ROUNDS} new objects, by another client"


def list_after_write(subject: Subject) -> Answer:
    for number in range(ROUNDS):
        name = f"listed/{number}"
        subject.names.put(name, bytes(number))
        sizes = subject.second.sizes("listed/")
        if sizes.get(name) != number or len(sizes) != number + 1:
            return Outcome.BROKEN, f"the listing after {name!r} was written has {sizes}"
    return Outcome.KEPT, f"{ROUNDS} of {ROUNDS} listings had the newest object and its size"


def overwrite_is_visible(subject: Subject) -> Answer:
    for number in range(ROUNDS):
        content = b"%d" % number * (number + 1)
        subject.names.put("again", content)
        if subject.second.get("again", 200) != content:
            return Outcome.BROKEN, "an old version was read after a new one was acknowledged"
        if subject.second.sizes("again") != {"again": len(content)}:
            return Outcome.BROKEN, "an old version was listed after a new one was acknowledged"
    return Outcome.KEPT, f"{ROUNDS} of {ROUNDS} versions were read and listed at once"


def delete_is_visible(subject: Subject) -> Answer:
    for number in range(ROUNDS):
        name = f"gone/{number}"
        subject.names.put(name, b"x")
        subject.second.get(name, 1)
        subject.names.delete([name])
        if name in subject.second.sizes("gone/"):
            return Outcome.BROKEN, f"{name!r} was deleted and is still listed"
        try:
            subject.second.get(name, 1)
        except FileNotFoundError:
            continue
        return Outcome.BROKEN, f"{name!r} was deleted and can still be read"
    return Outcome.KEPT, f"{ROUNDS} of {ROUNDS} deletions"


def large_put_is_atomic(subject: Subject) -> Answer:
    """Readers of an object that is overwritten see one version or another, never a mixture."""
    versions = [bytes([number]) * LARGE_BYTES for number in range(3)]
    subject.names.put("large", versions[0])
    over = threading.Event()

    def work(number: int) -> object:
        if number == 0:
            try:
                for turn in range(1, 7):
                    subject.names.put("large", versions[turn % 3])
            finally:
                over.set()
            return None
        reads = 0
        while not over.is_set() or not reads:
            content = subject.second.get("large", GET_MAX)
            if content not in versions:
                return f"{len(content)} bytes of {sorted(set(content))}"
            reads += 1
        return reads

    results = at_once(work, 3)
    failed = [result for result in results if isinstance(result, (str, Exception))]
    if failed:
        return Outcome.BROKEN, f"a reader saw a mixture or failed: {failed[0]}"
    seen = sum(result for result in results if isinstance(result, int))
    how = "by a rename" if subject.is_directory else "in one request"
    size = LARGE_BYTES >> 20
    return Outcome.KEPT, f"{seen} reads of {size} MB amid 6 overwritings ({how}): each whole"


GUARANTEES = [
    Guarantee(
        "exclusive publish", "of several that create one name exactly one wins", True,
        exclusive_publish,
    ),
    Guarantee("read after write", "what was acknowledged is read", True, read_after_write),
    Guarantee("list after write", "what was acknowledged is listed", True, list_after_write),
    Guarantee("overwrite", "a new version replaces the old one at once", True,
              overwrite_is_visible),
    Guarantee("delete", "what was deleted is neither read nor listed", True, delete_is_visible),
    Guarantee("atomic large put", "a large object is absent or whole", True, large_put_is_atomic),
]  # fmt: skip
