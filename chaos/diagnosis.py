"""From the first state that differs to what is usually wrong with the job."""

from __future__ import annotations

from seatrial.recovery.compare import Difference

_BY_COMPONENT = {
    "progress": "the step, epoch or sample count was not saved or not put back",
    "sampler": "the data position was not restored: samples repeat or are skipped",
    "rng": "only random streams differ at first: dropout masks will; save the RNG of every rank",
    "scheduler": "the scheduler was not restored: the learning rate follows another curve",
    "scaler": "the grad scaler was not restored: steps will be skipped at other times",
    "optimizer": "moments or step counts were not restored: the next update has another size",
    "model": "parameters differ: restored from other bytes, or a reduction ran in another order",
}

NONDETERMINISM_CAUSES = (
    "an RNG that is not seeded from the seed and the rank",
    "iteration over a set or a directory listing",
    "data-loader workers without a fixed seed",
    "a nondeterministic kernel (torch.use_deterministic_algorithms(True) finds it)",
    "time, process ids or the attempt number used in the computation",
)
"""Why two uninterrupted runs of one job usually differ."""


def likely_cause(difference: Difference) -> str:
    """What usually lies behind such a difference, as half a sentence; empty if unknown."""
    if difference.kind == "copies":
        return "replicas that should be equal are not: one rank missed or changed a reduction"
    if difference.kind == "missing":
        return "it was in the reference: lazily created state that the restore did not create"
    if difference.name.endswith("param_groups"):
        return "a learning rate or another hyperparameter differs: was the LR scheduler restored?"
    return _BY_COMPONENT.get(difference.component, "")
