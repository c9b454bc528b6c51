"""From the first state that differs to what is usually wrong with the job."""

from __future__ import annotations

from collections.abc import Collection

from seatrial.recovery.compare import Difference

UNSETTLED_BUCKETS = "unsettled gradient buckets"
"""A hazard: DDP on 3 or more ranks that had not regrouped its buckets when training went on."""

_BUCKET_TRAP = (
    "DDP on 3 or more ranks regroups its gradient buckets after the first backward of a process, "
    "and the order of a sum with them: the restarted ranks did so one step after the restore. Run "
    "a throw-away step before the restore, or set find_unused_parameters=True (see "
    "docs/writing-a-job.md)"
)

_BY_COMPONENT = {
    "progress": "the step, epoch or sample count was not saved or not put back",
    "sampler": "the data position was not restored: samples repeat or are skipped",
    "rng": "only random streams differ at first: dropout masks will; save the RNG of every rank",
    "scheduler": "the scheduler was not restored: the learning rate follows another curve",
    "scaler": "the grad scaler was not restored: steps will be skipped at other times",
    "optimizer": "moments or step counts were not restored: the next update has another size",
    "model": "parameters differ: restored from other bytes, or a reduction ran in another order",
}

_SINCE_THE_RESTORE = (
    "it was equal right after the restore: something that is in no component, or is another in a "
    "new process, such as a counter, an iterator or the attempt's number, has changed it since"
)

NONDETERMINISM_CAUSES = (
    "an RNG that is not seeded from the seed and the rank",
    "iteration over a set or a directory listing",
    "data-loader workers without a fixed seed",
    "a nondeterministic kernel (torch.use_deterministic_algorithms(True) finds it)",
    "time, process ids or the attempt number used in the computation",
)
"""Why two uninterrupted runs of one job usually differ."""


def likely_cause(
    difference: Difference, hazards: Collection[str] = (), *, was_equal: bool = False
) -> str:
    """What usually lies behind such a difference, as half a sentence; empty if unknown.

    ``hazards`` are those that the attempt recorded right after its restore, if the difference came
    in a step after it; ``was_equal`` says that right after the restore there was no difference.
    """
    only_sums = difference.component in ("optimizer", "model") and difference.kind == "value"
    if UNSETTLED_BUCKETS in hazards and only_sums and not _is_groups(difference):
        return _BUCKET_TRAP
    if difference.kind == "copies":
        return "replicas that should be equal are not: one rank missed or changed a reduction"
    if difference.kind == "uneven":
        return (
            "each rank had a value of its own, of which a checkpoint keeps one, such as batch "
            "norm's statistics: make it equal before it is saved (settle_buffers of "
            "seatrial.recovery), or an RNG stream"
        )
    if difference.kind == "missing":
        return "it was in the reference: lazily created state that the restore did not create"
    if _is_groups(difference):
        return "a learning rate or another hyperparameter differs: was the LR scheduler restored?"
    return _SINCE_THE_RESTORE if was_equal else _BY_COMPONENT.get(difference.component, "")


def _is_groups(difference: Difference) -> bool:
    return difference.name.endswith("param_groups")
