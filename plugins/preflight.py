"""The bundled pre-flight: which trials ``pytest --chaos`` runs, and what each must show.

Steps are derived from the run's size, so that every trial is possible whatever the options: the
main strike falls between the second checkpoint and the third. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from seatrial.chaos.errors import UsageError
from seatrial.chaos.events import COLLECTIVE, COMMIT_PROTOCOL
from seatrial.chaos.fault import Fault
from seatrial.chaos.network.layout import WAYS
from seatrial.chaos.powerloss.volatile import SURVIVES
from seatrial.chaos.route import Route
from seatrial.chaos.schedule import Schedule, Shape, require_possible
from seatrial.chaos.verdict import Verdict
from seatrial.recovery.topology import Topology

COMPONENTS = ("model", "optimizer", "scheduler", "scaler", "rng", "sampler", "progress")
"""The state components that a control leaves out, one each."""

EXTRAS = "extra-components"
"""Stands for all other components of a job's state, which are not known before it has run."""

_RESTARTS = 3  # by the kill in two restores in a row


@dataclass(frozen=True, kw_only=True)
class PlannedTrial:
    """One trial to run. ``omit`` makes it a control: a restore without that component must be
    called DIVERGED, by that name. ``lossless`` allows no step to be lost, as by a preemption.
    ``reshard`` are the topologies of the restarts, if they have others. ``skip`` says why it cannot
    be run here. ``needs`` is the collective without which a job has nothing to be struck by it;
    ``*`` stands for any."""

    name: str
    schedule: Schedule
    expect: Verdict = Verdict.RECOVERED
    omit: str = ""
    lossless: bool = False
    reshard: str = ""
    skip: str = ""
    needs: str = ""


def bundled_trials(
    shape: Shape, *, seed: int, extras: bool, reshard: Sequence[Route] = ()
) -> list[PlannedTrial]:
    """The whole pre-flight, in order: clean first, then faults, resharded restores, controls.

    ``extras`` adds a control of the components that only this job has.

    Raises:
        UsageError: the run is too short for two checkpoints and a strike after them, or for a
            strike in every attempt of a route but the last.
    """
    half = shape.checkpoint_interval // 2
    needed = 2 * shape.checkpoint_interval + max(3, half)  # a preemption needs a step after it
    if shape.steps < needed:
        raise UsageError(
            f"the pre-flight needs {needed} steps at a checkpoint interval of "
            f"{shape.checkpoint_interval}, the run has {shape.steps}: raise --chaos-steps or lower "
            "--chaos-checkpoint-interval"
        )
    if shape.max_restarts < _RESTARTS:
        raise UsageError(
            f"the pre-flight restarts a run up to {_RESTARTS} times, the limit is "
            f"{shape.max_restarts}: raise --chaos-max-restarts"
        )
    trials = []
    planned = (
        *_schedules(shape),
        *_of_collectives(shape, bundled=not extras),
        *_of_hosts(shape),
        *_power_cuts(shape),
    )
    for name, text in planned:
        schedule = Schedule(Schedule.parse(text).faults, seed)
        skip = ""
        if shape.object_store and any(_only_in_directories(f) for f in schedule.faults):
            skip = "an object store has no such event, so nothing can strike there"
        else:
            require_possible(schedule, shape)
        preempts = any(fault.action == "terminate" for fault in schedule.faults)
        name = name or schedule.label
        needs = next(filter(None, map(_needed, schedule.faults)), "")
        trials.append(
            PlannedTrial(name=name, schedule=schedule, lossless=preempts, skip=skip, needs=needs)
        )
    for route in reshard:
        kills = Schedule.parse(_kills_along(route, shape))
        trials.append(resharded(route.restarts, Schedule(kills.faults, seed)))
    omitted = (*COMPONENTS, EXTRAS) if extras else COMPONENTS
    return trials + [control(component) for component in omitted]


def _needed(fault: Fault) -> str:
    """The call that a fault is for; of one that bends whatever call is next, any."""
    if fault.at.name.startswith(COLLECTIVE):
        return fault.at.name.removeprefix(COLLECTIVE)
    return "*" if fault.concerns_collectives else ""


def _only_in_directories(fault: Fault) -> bool:
    return all(event.directory_only for event in fault.at.events())


def control(component: str) -> PlannedTrial:
    """The sensitivity control of one component."""
    return PlannedTrial(
        name=f"control[{component}]",
        schedule=Schedule(),
        expect=Verdict.DIVERGED,
        omit=component,
    )


def resharded(restarts: str, schedule: Schedule, name: str = "") -> PlannedTrial:
    """The trial whose restarts are on other topologies, joined by colons."""
    return PlannedTrial(name=name or f"reshard[{restarts}]", schedule=schedule, reshard=restarts)


def given_trials(
    schedules: tuple[str, ...], shape: Shape, *, seed: int, reshard: Sequence[Route] = ()
) -> list[PlannedTrial]:
    """One trial for each ``--chaos-fault``; with ``reshard`` one for each of these routes.

    Raises:
        UsageError: a schedule that does not parse or can never fire.
    """
    trials: list[PlannedTrial] = []
    labels: list[str] = []
    for text in schedules:
        schedule = Schedule.parse(text)
        if not schedule.seed:
            schedule = Schedule(schedule.faults, seed)
        for route in reshard:
            require_possible(schedule, replace(shape, later=route.sizes[1:]))
        if not reshard:
            require_possible(schedule, shape)
        name = schedule.label
        labels.append(name)
        if (count := labels.count(name)) > 1:
            name = f"{name}#{count}"
        restarts = [route.restarts for route in reshard]
        planned = [resharded(each, schedule, name=f"{name}@{each}") for each in restarts]
        trials += planned or [PlannedTrial(name=name, schedule=schedule)]
    return trials


def _main_kill(shape: Shape) -> str:
    """Between the second checkpoint and the third."""
    interval = shape.checkpoint_interval
    strike = 2 * interval + max(1, interval // 2)
    return f"kill rank={shape.world_size - 1} at=step:{strike}/backward"


def _kills_along(route: Route, shape: Shape) -> str:
    """A kill in every attempt but the last, each after a checkpoint of its own."""
    interval, count = shape.checkpoint_interval, len(route.worlds) - 1
    if count == 1:
        return _main_kill(shape)
    steps = [interval * number + max(1, interval // 2) for number in range(1, count + 1)]
    if steps[-1] > shape.steps:
        raise UsageError(
            f"--chaos-reshard: {route.restarts} needs {steps[-1]} steps at a checkpoint interval "
            f"of {interval}, the run has {shape.steps}: raise --chaos-steps"
        )
    return "; ".join(
        f"kill rank={route.of(attempt).ranks - 1} at=step:{step}/backward attempt={attempt}"
        for attempt, step in enumerate(steps, start=1)
    )


def _schedules(shape: Shape) -> Iterator[tuple[str, str]]:
    """``(name, schedule)``; an empty name stands for the schedule's own label."""
    interval = shape.checkpoint_interval
    saved = 2 * interval
    strike = saved + max(1, interval // 2)
    other = shape.world_size - 1
    first_kill = _main_kill(shape)

    yield "", "clean"
    for phase in ("data", "forward", "backward", "optimizer"):
        yield "", f"kill rank={other} at=step:{strike}/{phase}"
    if other:
        yield "", f"kill rank=0 at=step:{strike}/backward"
    yield "", f"kill rank=* at=step:{strike}/backward"
    for event in COMMIT_PROTOCOL:
        rank = 0 if event.coordinator_only else other
        yield "", f"kill rank={rank} at=step:{saved}/{event.name}"
    for name in ("checkpoint/manifest/link", "checkpoint"):
        yield "", f"kill rank=0 at=step:{saved}/{name} when=after"
    yield "", f"stop rank={other} at=step:{strike}/forward"
    yield "", f"stop rank={other} at=step:{strike}/forward resume=0.3"
    # Not right after a checkpoint, where a rank that just dies would lose no step either.
    yield "", f"terminate rank={other} at=step:{saved + 2}/backward"
    yield "", f"exit rank={other} at=step:{strike}/optimizer code=3"
    yield "", f"raise rank={other} at=step:{strike}/backward"
    yield "", f"oom rank={other} at=step:{strike}/forward"
    full = f"fail rank={other} at=step:{saved}/storage/write error=ENOSPC times=always"
    yield "fail[disk-full]", full
    yield "fail[read-error]", f"{first_kill}; fail rank={other} at=storage/read error=EIO attempt=2"
    yield "kill[restore]", f"{first_kill}; kill rank={other} at=restore/shard/read"
    again = f"kill rank=0 at=restore attempt=2; kill rank={other} at=restore/load attempt=3"
    yield "kill[twice-in-restore]", f"{first_kill}; {again}"
    link = f"kill rank=0 at=step:{saved}/checkpoint/manifest/link"
    yield "leftovers[two-unfinished-saves]", f"{link}; {link} attempt=2"
    # After a step of its own in the next step, the rank knows that all others are out of the save.
    at = f"rank={other} at=step:{saved + 1}/optimizer"
    for name, damage in (
        ("tear[shard]", "tear"),
        ("flip[shard]", "flip"),
        ("remove[shard]", "remove"),
        *([("swap[shard]", "swap")] if other else []),
        ("rollback[shard]", "rollback"),
        ("flip[objects]", "flip part=objects"),
        ("flip[manifest]", "flip part=manifest"),
        ("remove[manifest]", "remove part=manifest"),
    ):
        action, _, part = damage.partition(" ")
        yield name, f"{action} {at} {part}; kill {at} when=after"


def _power_cuts(shape: Shape) -> Iterator[tuple[str, str]]:
    """At every event of a save, losing all that may be lost; and each way in which less is lost."""
    if not shape.powerloss:
        return
    saved = 2 * shape.checkpoint_interval
    for event in COMMIT_PROTOCOL:
        yield "", f"powercut rank=* at=step:{saved}/{event.name}"
    yield "", f"powercut rank=* at=step:{saved}/checkpoint/manifest/link when=after"
    yield "", f"powercut rank=* at=step:{saved}/checkpoint when=after"
    yield "", f"powercut rank=* at=step:{saved + 1}/backward"
    again = f"powercut rank=* at=step:{saved}/checkpoint/gather"
    yield "powercut[two-unfinished-saves]", f"{again}; {again} attempt=2"
    for survives in SURVIVES[1:] if shape.powerloss == "fuse" else ():
        for name in ("checkpoint/gather", "checkpoint/manifest/fsync", "checkpoint/acknowledge"):
            yield "", f"powercut rank=* at=step:{saved}/{name} survives={survives}"


def _of_hosts(shape: Shape) -> Iterator[tuple[str, str]]:
    """Faults of the last host and its link, and the loss of the one with torchrun's rendezvous."""
    if not shape.hosts:
        return
    interval = shape.checkpoint_interval
    saved = 2 * interval
    strike = saved + max(1, interval // 2)
    host = f"node={shape.world_size // shape.ranks_per_node - 1}"
    for way in WAYS:
        yield "", f"partition {host} at=step:{strike}/backward way={way}"
    yield "", f"partition {host} at=step:{strike}/backward heal=0.5"
    yield "", f"partition {host} at=step:{saved}/checkpoint/report"
    yield "", f"throttle {host} at=step:{strike}/backward rate=20000"
    yield "", f"reset {host} at=step:{strike}/backward"
    yield "", f"crash {host} at=step:{strike}/backward"
    yield "", f"crash node=0 at=step:{saved}/checkpoint/report"


def _of_collectives(shape: Shape, *, bundled: bool) -> Iterator[tuple[str, str]]:
    """Faults of collectives. What no job need have is left to those that are known to have it."""
    interval = shape.checkpoint_interval
    strike = 2 * interval + max(1, interval // 2)
    other = shape.world_size - 1
    if not other:
        return
    call = f"rank={other} at=step:{strike}/collective/all_reduce"
    backward = f"rank={other} at=step:{strike}/backward"
    is_replicated = Topology.parse(shape.topology or f"dp{other + 1}").size("dp") == other + 1
    for action in ("skip", "duplicate", "wrong-shape", "wrong-dtype", "wrong-reduction"):
        yield f"{action}[all_reduce]", f"{action} {call}"
    # Long enough to stand out on a busy machine; who was late is told with -v.
    yield "delay[straggler]", f"delay {backward} seconds=0.3"
    # Another call of the rank must not be taken for it, so one that nothing else is under way with.
    yield "drop[hang]", f"drop rank={other} at=step:{strike}/optimizer"
    if is_replicated:
        # In a shard that no other rank holds a copy of, nobody could notice.
        yield "garble[gradient]", f"garble {backward}"
    if is_replicated and bundled:
        # Only calls that are under way together can change places, as DDP's buckets are.
        yield "reorder[buckets]", f"reorder {call}"
