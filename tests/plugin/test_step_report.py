"""Verifies that a step's report takes the numbers that training loops have at hand, and says in one
sentence what is none."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from seatrial.chaos.errors import UsageError
from seatrial.plugins.jobs import StepReport


def report(**given: Any) -> StepReport:
    return StepReport(**{"loss": 1.0, "epoch": 0, "samples": [0], **given})


@pytest.mark.parametrize(
    "indices",
    [torch.tensor([3, 1]), list(torch.tensor([3, 1])), numpy.array([3, 1]), range(3, 0, -2)],
    ids=["tensor", "list of tensors", "array", "range"],
)
def test_indices_may_be_tensors_and_arrays(indices: Any) -> None:
    found = report(samples=indices, padding=indices, skipped=indices)
    assert (found.samples, found.padding, found.skipped) == ((3, 1),) * 3
    assert {type(each) for each in found.samples} == {int}


def test_numbers_may_be_tensors() -> None:
    found = report(loss=torch.tensor(0.5), epoch=torch.tensor(2), tokens=numpy.int64(7))
    assert (found.loss, found.epoch, found.tokens) == (0.5, 2, 7)
    assert (type(found.loss), type(found.epoch), type(found.tokens)) == (float, int, int)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"samples": [0.5]}, "samples=[0.5] should be a sequence of whole numbers"),
        ({"samples": 3}, "samples=3 should be a sequence of whole numbers"),
        ({"epoch": None}, "epoch=None should be a whole number"),
        ({"tokens": 1.5}, "tokens=1.5 should be a whole number"),
        ({"loss": None}, "loss=None should be one number"),
        ({"loss": torch.zeros(2)}, "should be one number"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_no_number_is_refused_in_one_sentence(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        report(**given)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
