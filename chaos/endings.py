"""Which strikes can end an attempt. Torch-free; for the judge."""

from __future__ import annotations

from .actions import ACTIONS, DAMAGE
from .case import Case
from .data import refused_a_record
from .effects import ended_by_operation
from .events import STORAGE
from .ledger import Strike
from .network.evidence import outlived
from .run import Attempt


def can_end(case: Case, strike: Strike, attempt: Attempt) -> bool:
    """Whether a strike is one that ends ``attempt``: a stop or a delay that is soon over is not,
    nor a spoilt record that the rank did not refuse.

    A partition that was healed is none once every rank has completed a step since. An altered
    operation is one only if it still goes on, or if an error tells of it. Of a bent
    collective `seatrial.chaos.bending` knows more.
    """
    if strike.attempt != attempt.number or strike.action in DAMAGE:
        return False
    if strike.action == "spoil":
        return refused_a_record(case.run, strike)
    if ACTIONS[strike.action].operations and strike.event.startswith(STORAGE):
        return ended_by_operation(case, strike)
    if strike.action == "throttle":
        return attempt.ending == "hung"  # a slow link breaks nothing
    lasts_s = strike.resume
    if strike.action == "partition" and lasts_s is not None:
        if outlived(case.run, strike):
            return False
        lasts_s = 2 * lasts_s + 1  # TCP tries again ever more rarely, and after that at the latest
    return lasts_s is None or strike.t + lasts_s > attempt.ended_t
