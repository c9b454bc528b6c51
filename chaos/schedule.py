"""An ordered list of faults and one seed: a value that prints as one line, parses back, replays.

``clean`` is the schedule without faults. `require_possible` refuses, before anything is launched,
a fault that could never fire in the run it is meant for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .actions import DAMAGE, LIES, NETWORK
from .errors import FaultSyntaxError, ImpossibleFaultError
from .events import At
from .fault import Fault

_SEED = re.compile(r"seed=(\d+)")


@dataclass(frozen=True)
class Schedule:
    """What is done to one run. ``seed`` decides what a fault leaves open, such as which bit."""

    faults: tuple[Fault, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise FaultSyntaxError(f"seed={self.seed}: a seed is 0 or more")

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read ``kill rank=1 at=step:12/backward; kill rank=0 at=restore attempt=2``.

        Raises:
            FaultSyntaxError: with the fault and the word that is wrong.
        """
        parts = [part.strip() for part in text.split(";")]
        seed = 0
        if match := _SEED.fullmatch(parts[0]):
            seed = int(match[1])
            parts = parts[1:]
        if parts in ([], ["clean"]):
            return cls(seed=seed)
        if not all(parts):
            raise FaultSyntaxError(
                f"schedule {text!r} has an empty fault; separate faults with one ';', "
                "or write 'clean' for none"
            )
        return cls(tuple(Fault.parse(part) for part in parts), seed)

    def __str__(self) -> str:
        parts = [f"seed={self.seed}"] if self.seed else []
        parts += [str(fault) for fault in self.faults] or ["clean"]
        return "; ".join(parts)

    @property
    def in_the_data(self) -> Schedule:
        """The faults that an uninterrupted run meets too, because its data has them."""
        return Schedule(tuple(each for each in self.faults if each.is_in_the_data), self.seed)

    @property
    def label(self) -> str:
        """A readable test identifier, such as ``kill[rank1-step12-backward]``."""
        if not self.faults:
            return "clean"
        names = "+".join(dict.fromkeys(fault.action for fault in self.faults))
        return f"{names}[{'+'.join(fault.label for fault in self.faults)}]"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The facts of a run that decide whether a fault can fire.

    ``hosts`` says that each node is a host with a network of its own. ``later`` are the world size
    and the ranks per node of the attempts after the first, where they have others; the last ones
    stay.
    """

    world_size: int
    ranks_per_node: int
    steps: int
    checkpoint_interval: int
    max_restarts: int = 3
    object_store: bool = False
    powerloss: str = ""
    topology: str = ""
    hosts: bool = False
    later: tuple[tuple[int, int], ...] = ()

    def sizes(self, attempts: range) -> list[tuple[int, int]]:
        """The world size and the ranks per node of these attempts."""
        known = ((self.world_size, self.ranks_per_node), *self.later)
        return [known[min(attempt, len(known)) - 1] for attempt in attempts]

    def is_checkpoint(self, step: int) -> bool:
        """Whether the run saves after ``step``."""
        return step == self.steps or (step > 0 and step % self.checkpoint_interval == 0)


def require_possible(schedule: Schedule, shape: Shape) -> None:
    """Raise `ImpossibleFaultError` for the first fault that can never fire."""
    for fault in schedule.faults:
        if reason := _impossible(fault, shape, schedule.faults):
            raise ImpossibleFaultError(f"fault '{fault}' can never fire: {reason}")


def _impossible(fault: Fault, shape: Shape, faults: Iterable[Fault]) -> str | None:
    sizes = shape.sizes(_attempts_of(fault, shape))
    targets = {rank for size in sizes for rank in _targets(fault, *size)}
    if not targets:
        ranks, per_node = max(sizes)
        whose = f"attempt {fault.attempt}" if fault.attempt and shape.later else "the job"
        return f"{whose} has {ranks} ranks on {-(-ranks // per_node)} node(s), counted from 0"
    events = fault.at.events()
    if 0 not in targets and all(event.coordinator_only for event in events):
        return f"only rank 0 reaches {fault.at.name}"
    if fault.action == "powercut" and not shape.powerloss:
        return "its stores are not on a disk that can lose power; add --chaos-powerloss fuse"
    if fault.action in NETWORK and not shape.hosts:
        return "all ranks are on one host; add --chaos-launcher hosts"
    if shape.powerloss in ("ext4", "xfs") and fault.survives != "certain":
        return f"{shape.powerloss} decides for itself what survives; leave out survives="
    if fault.action == "swap" and shape.world_size == 1:
        return "there is no other rank to change places with"
    # What else a job stores, by chaos:: URLs, is not known here.
    if shape.object_store and not fault.at.is_storage and all(e.directory_only for e in events):
        return f"an object store has no {fault.at.name}"
    stages = {event.stage for event in events}
    step = fault.at.step
    if step is not None:
        if stages == {"process"}:
            return f"{fault.at.name} does not belong to a step"
        if step > shape.steps:
            return f"the run ends at step {shape.steps}"
        if step < 1:
            return "steps count from 1"
        preempted = any(other.action == "terminate" for other in faults)
        if stages <= {"checkpoint", "restore"} and not (preempted or shape.is_checkpoint(step)):
            return (
                f"no checkpoint is saved at step {step}, "
                f"only every {shape.checkpoint_interval} steps and at the end"
            )
    if fault.action == "terminate" and (step == shape.steps or fault.at.name == "exit"):
        return f"the run ends with step {shape.steps}, so nothing is left to be preempted"
    at_most = _occurrences(fault.at, shape)
    if at_most is not None and fault.nth > at_most:
        return f"{fault.at} happens at most {at_most} time{'s' * (at_most > 1)} in an attempt"
    attempts = shape.max_restarts + 1
    if fault.attempt is not None and fault.attempt > attempts:
        return f"the run has at most {attempts} attempt{'s' * (attempts > 1)}"
    if fault.action == "wrong-group" and shape.world_size == 1:
        return "one rank is in no group with others"
    harmful = any(each.action in (*DAMAGE, *LIES) for each in faults)
    if fault.at.name == "restore/quarantine" and not harmful:
        return "nothing is quarantined unless another fault damages a checkpoint"
    return _unreached(fault, faults, shape)


def _occurrences(at: At, shape: Shape) -> int | None:
    """How often a rank reaches the event in one attempt, where that does not depend on the job."""
    if at.name in ("start", "exit"):
        return 1
    if at.name == "step":
        return shape.steps if at.step is None else 1
    return None


def _unreached(fault: Fault, faults: Iterable[Fault], shape: Shape) -> str | None:
    """Why the attempt that the fault waits for never begins: nothing ends one before it."""
    restores = _only_in_restore(fault)
    if not restores and fault.attempt in (None, 1):
        return None
    if restores and fault.attempt == 1:
        return "nothing is restored in the first attempt"
    wanted = fault.attempt or 2
    others = [other for other in faults if other is not fault and other.action not in DAMAGE]
    first = any(other.attempt in (None, 1) and not _only_in_restore(other) for other in others)
    if first and sum(_attempts_ended(other, shape) for other in others) >= wanted - 1:
        return None
    if restores and fault.attempt is None:
        return "nothing is restored unless another fault ends an attempt first"
    ended = "an attempt" if wanted == 2 else f"{wanted - 1} attempts"
    return f"there is no attempt {wanted} unless other faults end {ended} first"


def _attempts_ended(fault: Fault, shape: Shape) -> int:
    """The most attempts that a fault can end. Its ranks may be struck one in each attempt."""
    if fault.attempt is not None:
        return 1
    if fault.persistent:
        return shape.max_restarts
    return max(len(_targets(fault, *size)) for size in shape.sizes(_attempts_of(fault, shape)))


def _attempts_of(fault: Fault, shape: Shape) -> range:
    """The attempts in which a fault may strike, as far as their ranks differ."""
    if fault.attempt is not None:
        return range(fault.attempt, fault.attempt + 1)
    return range(2 if _only_in_restore(fault) else 1, len(shape.later) + 3)


def _targets(fault: Fault, world_size: int, ranks_per_node: int) -> tuple[int, ...]:
    return fault.targets(world_size=world_size, ranks_per_node=ranks_per_node)


def _only_in_restore(fault: Fault) -> bool:
    return all(event.stage == "restore" for event in fault.at.events())
