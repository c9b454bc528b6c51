"""Builds the files that ranks and supervisor leave behind, so that a judge can be asked about any.

The run imitated: two ranks, six steps, a checkpoint after every second one, an epoch of four
samples used up in two steps.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from seatrial.chaos.case import Resharded
from seatrial.chaos.launch.plan import trace_file
from seatrial.chaos.ledger import Ledger, Strike
from seatrial.chaos.run import Attempt, Ending, Run, StoreState
from seatrial.chaos.schedule import Schedule
from seatrial.chaos.trace import TraceWriter
from seatrial.chaos.trajectory import read_trajectory
from seatrial.chaos.verdict import Judgement, judge

RANKS, STEPS, INTERVAL, SAMPLES = 2, 6, 2, 4
KILL = "kill rank=1 at=step:5/data"
FLIP = f"flip rank=1 at=step:5/data; {KILL} when=after"
KILLED = {0: 1, 1: -signal.SIGKILL}
ALL = range(1, STEPS + 1)
COMPONENTS = ("model", "optimizer", "scheduler", "rng", "sampler", "progress")


def state(rank: int, step: int, wrong: Iterable[str] = ()) -> dict[str, Any]:
    """The fingerprint of one rank after ``step``; components in ``wrong`` have another value."""
    values = {f"{name}/x": f"{name}{step}" for name in COMPONENTS}
    values |= {f"{name}/x": "wrong" for name in wrong}
    return {"rank": rank, "tensors": {}, "shared": values, "own": {}}


def outputs(rank: int, step: int) -> dict[str, Any]:
    epoch, turn = divmod(step - 1, 2)
    return {"loss": (1.0 / step).hex(), "samples": [epoch, [2 * turn + rank]]}


class Evidence:
    """One run in a directory of its own; attempts are added one after the other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.attempts: list[Attempt] = []
        (directory / "traces").mkdir(parents=True)
        (directory / "strikes").mkdir()

    def strike(
        self,
        text: str,
        *,
        attempt: int = 1,
        rank: int = 1,
        fault: int = 0,
        step: int | None = 5,
        event: str = "data",
        t: float | None = None,
        grace: float | None = None,
    ) -> None:
        """Say that the ``fault``-th fault of the schedule struck."""
        words = text.split()
        lasts = (w.partition("=") for w in words if w.startswith(("resume=", "heal=")))
        resume = next((float(seconds) for _, _, seconds in lasts), None)
        Ledger(self.directory / "strikes").claim(
            Strike(
                fault=fault,
                action=words[0],
                rank=rank,
                attempt=attempt,
                event=event,
                edge="before",
                step=step,
                t=10.0 * attempt if t is None else t,
                grace=grace,
                resume=resume,
            ),
            persistent=True,
        )

    def fail(
        self,
        *,
        rank: int,
        attempt: int,
        error: str,
        causes: Iterable[str] = (),
        said: Iterable[str] = (),
        t: float,
        message: str = "",
    ) -> None:
        """Say that an exception ended a rank at time ``t``; ``said`` are the messages of causes."""
        facts = {"type": error, "bases": [error], "message": message, "causes": list(causes)}
        self.record(rank, attempt, "error", t=t, **facts, said=list(said))

    def record(self, rank_of_trace: int, attempt: int, kind: str, /, **fields: Any) -> None:
        """Add a record to a trace, by default from before the attempt's strike."""
        trace = TraceWriter(trace_file(self.directory, attempt, rank_of_trace))
        trace.record(kind, **{"t": 10.0 * attempt - 1, **fields})
        trace.close()

    def attempt(
        self,
        steps: Iterable[int],
        *,
        restored: int | None = None,
        source: int | None = None,
        ending: Ending = "completed",
        exits: Mapping[int, int] | None = None,
        heard: Mapping[int, float] | None = None,
        published: Iterable[int] = (),
        valid: Iterable[int] = (),
        damaged: Mapping[int, str] | None = None,
        damage: Iterable[int] = (),
        rejected: Mapping[int, str] | None = None,
        wrong: Mapping[int, str] | None = None,
        wrong_at_start: str = "",
        silent: Iterable[int] = (),
        changed: Mapping[tuple[int, int], Mapping[str, Any]] | None = None,
        leftovers: tuple[str, ...] = (),
        cause: str = "",
        strays: tuple[str, ...] = (),
        litter: tuple[str, ...] = (),
        error: str = "",
    ) -> None:
        """Add an attempt.

        ``wrong`` names a component that differs from that step on, ``wrong_at_start`` one that
        differs in the beginning; ``silent`` ranks leave no trace; ``changed`` replaces outputs of
        (rank, step); ``damage`` are steps that a fault damaged; ``rejected`` says why a restore
        passed over steps; ``error`` is the class of the exception that ended silent ranks.
        """
        number = len(self.attempts) + 1
        steps = list(steps)
        for rank in set(range(RANKS)) - set(silent):
            self.record(
                rank,
                number,
                "began",
                restored=restored,
                source=source,
                damaged=list((rejected or {}).items()),
                notes=[],
                samples_per_epoch=SAMPLES,
                fingerprint=state(rank, restored or 0, [wrong_at_start] if wrong_at_start else ()),
            )
            for step in steps:
                differs = [name for first, name in (wrong or {}).items() if step >= first]
                self.record(
                    rank,
                    number,
                    "step",
                    step=step,
                    outputs=outputs(rank, step) | dict((changed or {}).get((rank, step), {})),
                    fingerprint=state(rank, step, differs),
                )
                if step in published:
                    self.record(rank, number, "published", step=step)
            for step in damage if rank == 1 else ():
                self.record(rank, number, "damage", fault=0, step=step, file="x", change="x")
        for rank in silent if error else ():
            self.fail(rank=rank, attempt=number, error=error, t=10.0 * number + 1)
        store = StoreState(valid=tuple(valid), damaged=dict(damaged or {}), leftovers=leftovers)
        self.attempts.append(
            Attempt(
                number=number,
                ending=ending,
                launched_t=10.0 * number - 5,
                ended_t=10.0 * number + 4,
                exits=dict(exits if exits is not None else {0: 0, 1: 0}),
                heard=dict(heard or {}),
                cause=cause,
                strays=strays,
                litter=litter,
                store=store,
            )
        )

    @property
    def run(self) -> Run:
        return Run(
            directory=self.directory, ranks=RANKS, attempts=tuple(self.attempts), total_s=1.0
        )

    def judged(
        self,
        reference: Evidence,
        schedule: str,
        *,
        steps: range = range(1, STEPS + 1),
        resharded: Resharded | None = None,
    ) -> Judgement:
        return judge(
            read_trajectory(reference.run),
            self.run,
            Schedule.parse(schedule),
            checkpoint_interval=INTERVAL,
            expected_steps=steps,
            resharded=resharded,
        )


def uninterrupted(directory: Path) -> Evidence:
    """Six steps, and nothing was done to them."""
    clean = Evidence(directory)
    clean.attempt(ALL, published=(2, 4, 6), valid=(4, 6))
    return clean


def interrupt(run: Evidence, **different: Any) -> None:
    """Add the first attempt as a kill in step 5 ends it, but for what is ``different``."""
    normal: dict[str, Any] = {"ending": "failed", "exits": KILLED}
    normal |= {"published": (2, 4), "valid": (2, 4)}
    run.attempt(different.pop("steps", range(1, 5)), **normal | different)


def finish(run: Evidence, **different: Any) -> None:
    """Add the second attempt as it should be, but for what is ``different``."""
    normal: dict[str, Any] = {"restored": 4, "source": 1, "published": (6,), "valid": (4, 6)}
    run.attempt(different.pop("steps", range(5, 7)), **normal | different)
