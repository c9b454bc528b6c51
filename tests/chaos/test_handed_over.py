"""Verifies that what a state holds beside tensors is handed to another topology beside the store,
too: a job that has it must not be told to differ from the oracle, nor be refused."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seatrial.plugins.jobs.handoff import hand_off, take_over
from seatrial.recovery.compare import combine, first_difference
from seatrial.recovery.fingerprint import fingerprint
from seatrial.recovery.run_manifest import describe
from seatrial.recovery.state import TrainingState


class Counts(torch.nn.Linear):
    """Keeps a number that is no tensor."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.number = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"number": self.number}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class Keeps:
    """A component with whatever it is given."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


def state_of(number: int, value: object) -> TrainingState:
    torch.manual_seed(number)
    model = torch.nn.Sequential(Counts(), Counts())
    model[1].number = number
    return TrainingState(model=model, extra={"average": Counts(), "kept": Keeps(value)})


@pytest.mark.parametrize(
    "value",
    [
        np.arange(3.0),
        np.float32(0.1),
        np.array(["a", "bc"]),
        frozenset({1, 2}),
        {"nested": [np.zeros((2, 2), dtype=np.int8), b"bytes", 1 << 70]},
    ],
    ids=["array", "scalar", "text", "frozenset", "nested"],
)
def test_all_that_a_state_may_hold_is_taken_over(tmp_path: Path, value: object) -> None:
    given, taken = state_of(3, value), state_of(0, None)
    hand_off(given, tmp_path, rank=0)
    take_over(taken, tmp_path, rank=0)
    ours, theirs = (combine([fingerprint(each, rank=0).to_json()]) for each in (given, taken))
    assert first_difference(ours, theirs) is None
    assert taken.model[1].number == 3


def test_what_a_file_in_memory_holds_is_taken_over(tmp_path: Path) -> None:
    given, taken = state_of(0, io.BytesIO(b"scales")), state_of(0, None)
    hand_off(given, tmp_path, rank=0)
    take_over(taken, tmp_path, rank=0)
    assert taken.stateful()["kept"].state_dict()["value"].getvalue() == b"scales"


def test_a_model_that_keeps_more_than_tensors_is_described() -> None:
    facts = {"device": "cpu", "topology": "dp1", "seed": 0, "steps": 1, "backend": "gloo"}
    described = describe(job=object(), context_facts=facts, state=state_of(0, None))
    assert described["precision"] == ["float32"]
