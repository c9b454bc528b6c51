"""Verifies that a step's report takes the numbers that training loops have at hand, and that what a
job returns or is made of wrongly is said in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from seatrial.chaos.errors import UsageError
from seatrial.plugins.jobs import StepReport, TrainingState
from seatrial.plugins.jobs.protocol import required
from seatrial.plugins.jobs.registry import load_job


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


def test_what_a_job_returns_must_be_a_state_and_a_report() -> None:
    with pytest.raises(
        UsageError, match=r"build\(\) of dict returned None; return a TrainingState"
    ):
        required(TrainingState, None, by="build() of dict")
    with pytest.raises(UsageError, match=r"step\(\) of dict returned 0.5; return a StepReport"):
        required(StepReport, 0.5, by="step() of dict")
    assert required(StepReport, report(), by="step() of dict") == report()


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("COUNT", {}, "COUNT is 3, and no class"),
        ("Plain", {"lr": "1"}, "does not take these parameters: got an unexpected keyword"),
        ("Needs", {}, "does not take these parameters: missing a required argument: 'path'"),
    ],
)
def test_what_is_no_job_class_or_takes_other_parameters_is_refused(
    tmp_path: Path, name: str, params: dict[str, object], says: str
) -> None:
    methods = "    def build(self, context): pass\n    def step(self, context): pass\n"
    file = tmp_path / f"jobs_{name}.py"
    file.write_text(
        f"COUNT = 3\nclass Plain:\n{methods}class Needs(Plain):\n"
        "    def __init__(self, path): pass\n"
    )
    with pytest.raises(UsageError, match=says):
        load_job(f"{file}:{name}", params)
