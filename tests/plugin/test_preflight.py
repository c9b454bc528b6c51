"""The bundled pre-flight plans only what can happen, whatever the size of the run."""

from __future__ import annotations

import pytest

from seatrial.chaos.errors import UsageError
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
