"""What the switch saw of an attempt: did a fault of the network matter, and who was cut off.

Guarantees: a cut has an effect only if a connection of the job had bytes under way that it kept up,
a slow link only if it held packets back, and a reset only if it closed a connection; that the
schedule says so is no evidence. A cut that was mended is over when every rank has completed a step
since. Torch-free.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import cast

from ..fault import Fault
from ..launch.plan import World
from ..ledger import Strike
from ..run import Run
from ..trace import Record

_WAYS = {
    "both": "was cut off",
    "out": "was not heard: what it sent was lost",
    "in": "heard nobody: what was sent to it was lost",
}


def no_effect(run: Run, fault: Fault, strike: Strike) -> str:
    """Why a strike at a host changed nothing, as half a sentence; empty if it had an effect."""
    seen = [r for r in run.network(strike.attempt) if r.get("fault") == strike.fault]
    attempt = run.attempts[strike.attempt - 1]
    if not seen:
        return "the switch between the hosts was not told of it"
    if failed := _all(seen, "failed"):
        return f"the switch could not mend the link ({failed[0]['failed']})"
    if fault.action == "crash":
        died = attempt.exits.get(strike.rank) == -signal.SIGKILL
        return "" if died and _all(seen, "killed") else f"rank {strike.rank} did not die of it"
    if fault.action == "throttle":
        return "" if _all(seen, "times") else "nothing that crossed its link had to wait"
    if attempt.ending == "completed" and not _all(seen, "did", "heal"):
        return "the attempt completed all the same"
    if fault.action == "reset":
        if not _all(seen, "gone"):
            return "no connection to another host was open"
        # In the step of the strike, and in the next, the last call may have been made before.
        return "the job went on all the same" if _went_on(run, strike) else ""
    return "" if _all(seen, "waiting") else "nothing was sent over that link while it was cut"


def _went_on(run: Run, strike: Strike) -> bool:
    """Whether a rank completed a step that it cannot have without the others."""
    return any(
        record["kind"] == "step" and int(str(record["step"])) > (strike.step or 0) + 1
        for rank in range(run.ranks_of(strike.attempt))
        for record in run.trace(strike.attempt, rank)
        if _t(record) > strike.t
    )


def outlived(run: Run, strike: Strike) -> bool:
    """Whether a partition was healed and every rank has then completed one and the same step.

    Whatever ends the attempt after that, the partition does not. Where several cut one host, the
    last of them counts: the switch mends the link when none is left.
    """
    seen = run.network(strike.attempt)
    cuts = [r for r in seen if r.get("fault") == strike.fault and r.get("did") == "cut"]
    hosts, since = {r["host"] for r in cuts}, min((_t(r) for r in cuts), default=0.0)
    healed = [_t(r) for r in _all(seen, "did", "heal") if r["host"] in hosts and _t(r) > since]
    if not healed:
        return False
    completed = [
        {
            r["step"]
            for r in run.trace(strike.attempt, rank)
            if r["kind"] == "step" and _t(r) > max(healed)
        }
        for rank in range(run.ranks_of(strike.attempt))
    ]
    return bool(set.intersection(*completed))


def _t(record: Record) -> float:
    return float(str(record["t"]))


def _all(seen: Sequence[Record], name: str, value: object = None) -> list[Record]:
    """The records in which something is in the list ``name``, or ``name`` is ``value``."""
    return [r for r in seen if (r.get(name) == value if value is not None else r.get(name))]


def cut_off(seen: Sequence[Record], world: World) -> str:
    """Which hosts the network did not carry for at the end of an attempt, as a sentence."""
    said = []
    for record in seen:
        if record["kind"] == "link":
            host, kept_up = int(str(record["host"])), cast(list[str], record["waiting"])
            ranks = range(host * world.ranks_per_node, (host + 1) * world.ranks_per_node)
            numbers = ", ".join(map(str, ranks))
            named = f"host {host} (rank{'s' * (len(ranks) > 1)} {numbers})"
            said.append(f"{named} {_WAYS[str(record['way'])]}; {_count(len(kept_up))} for it")
    return "; ".join(said)


def _count(number: int) -> str:
    return f"{number} connection{'s wait' if number != 1 else ' waits'}"
