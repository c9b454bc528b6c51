"""The conformance suite: one question for each guarantee, the same for every backend.

Guarantees: a question that cannot be asked of a backend is answered "not offered" or "not tried",
with the reason; an error is an observation too; nothing that was made is left.

Does not: wait for eventual consistency, or kill a server by itself (``restart`` does, where a test
owns one). Torch-free; called by ``--chaos-certify`` and by tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from seatrial.recovery.errors import CheckpointError

from . import protocol, visibility
from .certificate import Certificate, Observation, Outcome
from .subject import Guarantee, Subject, open_subject

__all__ = ["GUARANTEES", "certify", "observe"]

GUARANTEES: list[Guarantee] = [*visibility.GUARANTEES, *protocol.GUARANTEES]
"""Every question, in order."""


def certify(
    url: str,
    *,
    options: Mapping[str, object] | None = None,
    restart: Callable[[], None] | None = None,
) -> Certificate:
    """Ask every question of the place at ``url``.

    Raises:
        UsageError: it cannot be used at all.
    """
    subject = open_subject(url, options=options, restart=restart)
    try:
        found = [observe(subject, guarantee) for guarantee in GUARANTEES]
    finally:
        subject.clean_up()
    return Certificate(url=url, observations=tuple(found), notes=subject.notes)


def observe(subject: Subject, guarantee: Guarantee) -> Observation:
    """Ask one question; an error of the storage is an answer."""
    try:
        outcome, evidence, *figures = guarantee.ask(subject)
    except (OSError, CheckpointError) as error:
        outcome, evidence, figures = Outcome.BROKEN, f"{type(error).__name__}: {error}", []
    return Observation(
        guarantee=guarantee.name,
        needed=guarantee.needed,
        outcome=outcome,
        evidence=evidence,
        figures=figures[0] if figures else {},
    )
