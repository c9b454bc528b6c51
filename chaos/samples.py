"""The ledger of samples: in the lineage that survives, every sample is used exactly once an epoch.

Only the steps that the final state came from count; what a failed attempt consumed and lost is
consumed again, rightly. A sample that its owner skipped, because its record is damaged, counts as
consumed; one that only fills a batch up must have an owner besides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .trajectory import Step, Trajectory


def sample_faults(trajectory: Trajectory) -> Iterator[str]:
    """A sentence for every epoch in which a sample is repeated or missing.

    An epoch is complete once a later one has begun, or its count is reached; a run that reports no
    samples is reported too, since nothing could be checked.
    """
    lineage = trajectory.lineage()
    used: dict[int, Counter[int]] = {}
    padded: dict[int, set[int]] = {}
    for step in lineage:
        for epoch, owned, padding in _of_ranks(step):
            used.setdefault(epoch, Counter()).update(owned)
            padded.setdefault(epoch, set()).update(padding)
    sizes = {each.samples_per_epoch for each in trajectory.beginnings}
    size = sizes.pop() if len(sizes) == 1 else None
    if not any(used.values()):
        yield "no rank reported the samples that it consumed, so nothing shows they are used once"
    # A control begins in the middle of an epoch, of which the rest was used before it.
    begins_late = bool(lineage) and lineage[0].number > 1
    for epoch, counts in sorted(used.items()):
        repeated = sorted(sample for sample, count in counts.items() if count > 1)
        if repeated:
            yield f"epoch {epoch}: sample {repeated[0]} is consumed {counts[repeated[0]]} times"
        is_over = epoch < max(used) and not (begins_late and epoch == min(used))
        if size is not None and is_over and len(counts) != size:
            yield f"epoch {epoch} is over, but only {len(counts)} of {size} samples were consumed"
        ownerless = sorted(padded[epoch] - set(counts)) if is_over else []
        if ownerless:
            yield f"epoch {epoch}: sample {ownerless[0]} fills a batch up, and no rank owns it"


def _of_ranks(step: Step) -> Iterator[tuple[int, list[int], list[int]]]:
    """The epoch of each rank, the samples that it owns, used or skipped, and its padding."""
    for outputs in step.outputs:
        epoch, samples = outputs.get("samples", (0, ()))
        yield epoch, [*samples, *outputs.get("skipped", ())], outputs.get("padding", ())
