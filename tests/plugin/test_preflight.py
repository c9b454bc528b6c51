"""The bundled pre-flight plans only what can happen, whatever the size of the run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seatrial.chaos.errors import UsageError
from seatrial.chaos.launch.plan import World
from seatrial.chaos.route import Route
from seatrial.chaos.schedule import Shape, require_possible
from seatrial.plugins.preflight import bundled_trials


def shortest(interval: int) -> Shape:
    """The shape with the fewest steps that the pre-flight accepts."""
    for steps in range(1, 100):
        shape = Shape(world_size=2, ranks_per_node=2, steps=steps, checkpoint_interval=interval)
        try:
            bundled_trials(shape, seed=0, extras=False)
        except UsageError:
            continue
        return shape
    raise AssertionError("no number of steps is enough")


@pytest.mark.parametrize("interval", range(1, 8))
def test_the_shortest_run_can_meet_every_trial_and_be_preempted_before_its_end(
    interval: int,
) -> None:
    shape = shortest(interval)
    preempted = 0
    for trial in bundled_trials(shape, seed=0, extras=False):
        require_possible(trial.schedule, shape)
        for fault in trial.schedule.faults:
            if fault.action == "terminate":
                preempted += 1
                assert trial.lossless
                assert fault.at.step is not None
                assert fault.at.step < shape.steps
    assert preempted == 1


def test_a_route_is_killed_along_after_a_checkpoint_on_each_topology() -> None:
    shape = Shape(world_size=4, ranks_per_node=2, steps=14, checkpoint_interval=5)
    worlds = [World(ranks=n, nodes=n // 2, topology=f"fsdp{n}", device="cpu") for n in (4, 2, 4)]
    route = Route(tuple(worlds))
    trials = bundled_trials(shape, seed=0, extras=False, reshard=[route])
    (trial,) = [each for each in trials if each.reshard]
    assert (trial.name, trial.reshard) == ("reshard[fsdp2:fsdp4]", "fsdp2:fsdp4")
    first, second = trial.schedule.faults
    assert str(first) == "kill rank=3 at=step:7/backward attempt=1"
    assert str(second) == "kill rank=1 at=step:12/backward attempt=2"
    require_possible(trial.schedule, replace(shape, later=route.sizes[1:]))


def test_what_a_trial_needs_of_the_job_is_the_call_that_its_fault_is_for() -> None:
    shape = Shape(world_size=2, ranks_per_node=2, steps=14, checkpoint_interval=5)
    needs = {each.name: each.needs for each in bundled_trials(shape, seed=0, extras=False)}
    assert (needs["skip[all_reduce]"], needs["reorder[buckets]"]) == ("all_reduce", "all_reduce")
    assert (needs["drop[hang]"], needs["garble[gradient]"], needs["clean"]) == ("*", "*", "")
