"""The CUDA path on real devices: gloo where ranks share a GPU, NCCL with one GPU for each rank.

Verifies that the bundled job recovers bitwise on GPUs. Verifies nothing where there are none: the
tests say so and are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from seatrial.chaos.case import Verdict
from seatrial.chaos.schedule import Schedule
from seatrial.chaos.session import Session, Trial
from seatrial.plugins.options import ChaosOptions, experiment

GPUS = torch.cuda.device_count()
RunTrial = Callable[[int, str], Trial]

pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU; torch sees none")


@pytest.fixture
def run_trial(tmp_path: Path) -> Iterator[RunTrial]:
    session = Session(tmp_path / "session", owner="cuda")

    def run(ranks: int, topology: str) -> Trial:
        options = ChaosOptions(ranks=ranks, topology=topology, device="cuda")
        return session.trial(experiment(options), Schedule.parse("kill rank=1 at=step:12/backward"))

    yield run
    session.close()


def backend_of(trial: Trial) -> object:
    trace = trial.run.trace(1, 0)
    return next(record["backend"] for record in trace if record["kind"] == "device")


def test_ranks_that_outnumber_the_gpus_recover_over_gloo(run_trial: RunTrial) -> None:
    trial = run_trial(GPUS + 1, f"dp{GPUS + 1}")
    assert trial.verdict is Verdict.RECOVERED, trial.reason
    assert backend_of(trial) == "gloo"


@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA GPUs for NCCL")
@pytest.mark.parametrize("topology", ["dp2", "fsdp2"])
def test_one_rank_for_each_gpu_recovers_over_nccl(run_trial: RunTrial, topology: str) -> None:
    trial = run_trial(2, topology)
    assert trial.verdict is Verdict.RECOVERED, trial.reason
    assert backend_of(trial) == "nccl"
