"""What all ranks have to agree on before a checkpoint of theirs is worth publishing.

Guarantees: every guard is asked on every rank before anything of a save is written; if one objects,
all ranks raise alike, and nothing was published. The testimonies travel by the exchange of the
save, in one message from each rank for all guards, never by collectives.

`Consistency` of `seatrial.recovery.collectives` and `seatrial.recovery.replicas.Replicas` are
guards; a job may have its own. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from .agreement import RanksFailed, agree
from .checkpointable import Checkpointable
from .errors import RecoveryError, SaveError
from .exchange import Round

__all__ = ["Guard", "ask"]


class Guard(Protocol):
    """One question to all ranks. Testimonies and answers are JSON values."""

    @property
    def name(self) -> str:
        """In messages."""

    def testify(self, state: Checkpointable) -> Any:
        """What this rank has to say of itself and of the state that it is about to save."""

    def judge(self, testimonies: Sequence[Any]) -> Any:
        """On the coordinator: the answer to all ranks, from their testimonies in rank order."""

    def conclude(self, answer: Any) -> None:
        """On every rank: take the answer; a `RecoveryError` refuses the save on all alike."""


def ask(
    guards: Sequence[Guard], round_: Round, state: Checkpointable, *, rank: int, step: int
) -> None:
    """Ask all guards on all ranks.

    Raises:
        SaveError: a guard objected; its own class if that is a `SaveError`.
        RanksFailed: a guard failed on some rank.
    """

    def testify() -> object:
        return [guard.testify(state) for guard in guards]

    def judge(messages: list[Any]) -> object:
        if len({len(message) for message in messages}) != 1:
            raise SaveError("the ranks have different guards; give every rank's store the same")
        columns = zip(*messages, strict=True)
        return [guard.judge(list(column)) for guard, column in zip(guards, columns, strict=True)]

    try:
        answers = agree(round_, "guards", rank, testify, judge)
    except RanksFailed as failed:
        raise failed.as_error("the ranks could not be asked") from failed.__cause__
    assert isinstance(answers, list)
    for guard, answer in zip(guards, answers, strict=True):
        try:
            guard.conclude(answer)
        except SaveError as error:
            raise type(error)(f"step {step} was not saved: {error}") from error
        except RecoveryError as error:
            raise SaveError(f"step {step} was not saved: {error}") from error
