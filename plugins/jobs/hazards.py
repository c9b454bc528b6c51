"""What about a job, seen right after its restore, is known to make a resumed run differ.

Nothing is changed and nothing is judged: a hazard is recorded, and named as the cause only if the
run does differ. Called by the training loop.
"""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from seatrial.chaos.diagnosis import UNSETTLED_BUCKETS


def hazards_of(model: torch.nn.Module) -> list[str]:
    """The hazards of a model that has just been restored, as `seatrial.chaos.diagnosis` names them.

    ``UNSETTLED_BUCKETS``: DDP over 3 ranks or more that will regroup its gradient buckets in its
    second iteration (``Reducer::should_rebuild_buckets`` of torch: unless unused parameters are
    looked for, once in the life of a process). With 2 ranks a sum has no order.
    """
    found = []
    for module in model.modules():
        if not isinstance(module, DistributedDataParallel) or module.logger is None:
            continue
        regroups = module.static_graph or not module.find_unused_parameters
        # What DDP tells of itself is as of its last iteration; this brings it up to now.
        module.logger.set_runtime_stats_and_log()
        facts = module._get_ddp_logging_data()
        if regroups and module.process_group.size() > 2 and "rebuilt_bucket_sizes" not in facts:
            found.append(UNSETTLED_BUCKETS)
    return list(dict.fromkeys(found))
