"""One answer for all ranks: work on each, a decision on the coordinator, or everyone's failure.

Guarantees: an exception on any rank reaches every rank as text, with its class and its rank, so
no rank goes on alone or waits for a timeout; the failing rank's own exception is chained.
Exceptions that are not `Exception` (a signal, an exit) end the rank at once and tell nobody.
Torch-free; called by save and restore.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from . import errors
from .errors import CheckpointError
from .exchange import COORDINATOR, Round
from .probe import around

__all__ = ["Failure", "RanksFailed", "agree", "decode", "encode_failures", "encode_value"]


@dataclass(frozen=True)
class Failure:
    """An exception as other ranks learn of it: the name of its class, and its text."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        return cls(type(error).__name__, str(error))

    def __str__(self) -> str:
        return self.text if hasattr(errors, self.kind) else f"{self.kind}: {self.text}"


class RanksFailed(Exception):
    """Work failed on the ranks that ``failures`` names; raised on every rank."""

    def __init__(self, failures: Mapping[int, Failure]) -> None:
        self.failures = dict(failures)
        super().__init__("; ".join(f"rank {rank}: {why}" for rank, why in self.failures.items()))

    def has(self, *classes: type[Exception]) -> bool:
        """Whether some rank failed with one of ``classes``."""
        names = {each.__name__ for each in classes}
        return any(failure.kind in names for failure in self.failures.values())

    def as_error(self, what: str) -> CheckpointError | errors.StateError:
        """The common class of all failures if it is one of ours, else `CheckpointError`."""
        kinds = {failure.kind for failure in self.failures.values()}
        common = getattr(errors, kinds.pop(), CheckpointError) if len(kinds) == 1 else None
        if isinstance(common, type) and issubclass(common, (CheckpointError, errors.StateError)):
            return common(f"{what}: {self}")
        return CheckpointError(f"{what}: {self}")


def encode_value(value: bytes) -> bytes:
    """A message that carries ``value``."""
    return b"+" + value


def encode_failures(failures: Mapping[int, Failure]) -> bytes:
    """A message that carries failures, by rank."""
    return b"-" + json.dumps([[rank, f.kind, f.text] for rank, f in failures.items()]).encode()


def decode(message: bytes) -> bytes:
    """The value that a message carries; raises `RanksFailed` where it carries failures."""
    if message[:1] == b"+":
        return message[1:]
    raise RanksFailed({rank: Failure(kind, text) for rank, kind, text in json.loads(message[1:])})


def decode_all(messages: Sequence[bytes]) -> list[bytes]:
    """The values of all ranks; raises `RanksFailed` with the failures of all that failed."""
    values: list[bytes] = []
    failures: dict[int, Failure] = {}
    for message in messages:
        try:
            values.append(decode(message))
        except RanksFailed as failed:
            failures |= failed.failures
    if failures:
        raise RanksFailed(failures)
    return values


def agree(
    round_: Round,
    tag: str,
    rank: int,
    work: Callable[[], object],
    decide: Callable[[list[object]], object] = lambda values: None,
    *,
    event: str | None = None,
    **facts: object,
) -> object:
    """Run ``work`` on every rank and ``decide`` over all its results on the coordinator.

    Results and decision are JSON values. ``event``, if given, is announced around the exchange of
    messages: an exception raised before it counts as this rank's failure, one raised after it
    propagates here alone.

    Raises:
        RanksFailed: on every rank, if ``work`` or ``decide`` failed anywhere.
        CheckpointError: the other ranks could not be reached.
    """
    cause: Exception | None = None
    try:
        message = encode_value(json.dumps(work()).encode())
    except Exception as error:
        cause, message = error, encode_failures({rank: Failure.of(error)})

    answer: bytes | None = None
    try:
        if event is None:
            answer = _exchange(round_, tag, message, decide)
        else:
            with around(event, **facts):
                answer = _exchange(round_, tag, message, decide)
    except CheckpointError:
        raise
    except Exception as error:
        if answer is not None:
            raise
        cause = cause or error
        answer = _exchange(round_, tag, encode_failures({rank: Failure.of(error)}), decide)
    try:
        return json.loads(decode(answer))
    except RanksFailed as failed:
        raise failed from cause


def _exchange(
    round_: Round, tag: str, message: bytes, decide: Callable[[list[object]], object]
) -> bytes:
    round_.post(tag, message)
    if round_.is_coordinator:
        try:
            values = [json.loads(value) for value in decode_all(round_.collect(tag))]
            answer = encode_value(json.dumps(decide(values)).encode())
        except RanksFailed as failed:
            answer = encode_failures(failed.failures)
        except Exception as error:
            answer = encode_failures({COORDINATOR: Failure.of(error)})
        round_.announce(tag, answer)
    return round_.receive(tag)
