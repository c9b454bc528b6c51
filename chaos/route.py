"""The worlds of a run's attempts, and where the state of each attempt came from. Torch-free.

A restart may be on fewer ranks than were lost, and a later one on all of them again. A `Route` says
which attempt runs on which world; a `Descent` says through which worlds a state has passed, whoever
was killed on the way: that decides which uninterrupted run it must equal.
"""

from __future__ import annotations

from dataclasses import dataclass

from .launch.plan import World
from .trajectory import Trajectory


@dataclass(frozen=True)
class Route:
    """``worlds[0]`` is the first attempt's world, the next one the second's; the last one stays."""

    worlds: tuple[World, ...]

    def of(self, attempt: int) -> World:
        """The world of an attempt, counted from 1."""
        return self.worlds[min(attempt, len(self.worlds)) - 1]

    @property
    def restarts(self) -> str:
        """The topologies of the restarts, as they are typed: ``dp2:dp4``."""
        return ":".join(world.topology for world in self.worlds[1:])

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """``(world size, ranks per node)`` by attempt, as a `schedule.Shape` has them."""
        return tuple((world.ranks, world.ranks_per_node) for world in self.worlds)


@dataclass(frozen=True)
class Hop:
    """A world, and the step at which the state came to it; None if it started there."""

    world: World
    since: int | None = None


Descent = tuple[Hop, ...]
"""Oldest first. Neighbours have different worlds: a restart on the same one changes nothing."""


def descent_of(attempt: int, route: Route, trajectory: Trajectory) -> Descent | None:
    """Through which worlds the state came that an attempt began with.

    None if it is not known: the attempt never began, or with a checkpoint that no earlier attempt
    of this run can have saved.
    """
    beginning, world = trajectory.beginning(attempt), route.of(attempt)
    if beginning is None:
        return None
    if beginning.restored is None:
        return (Hop(world),)
    source = beginning.source
    if source is None or not 1 <= source < attempt:
        return None
    before = descent_of(source, route, trajectory)
    if before is None or beginning.restored <= (before[-1].since or 0):
        return None
    if before[-1].world == world:
        return before
    return (*before, Hop(world, beginning.restored))
