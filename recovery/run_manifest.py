"""What was running when a checkpoint was saved, and what a difference on restore means.

Guarantees: the description is plain data, small, and equal for two runs of the same thing on the
same machine. Does not judge whether a difference matters: `explain` names it and says what has to
be requalified before the run's results are trusted again.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .modules import module_tensors

if TYPE_CHECKING:
    from .state import TrainingState

REQUALIFY = {
    "code": "the job's source changed: repeat its own tests and a short reference run",
    "data": "the data changed: samples seen before and after are not one epoch of one dataset",
    "tokenizer": "the tokenizer changed: losses before and after cannot be compared",
    "optimizer": "the optimizer changed: its moments belong to another update rule",
    "schedule": "the schedule changed: learning rates no longer follow one curve",
    "precision": "the precision changed: bitwise equality cannot be expected",
    "kernels": "kernels may differ: qualify the numerics with a reference run",
    "communication": "reductions may sum in another order: qualify the numerics",
    "topology": "the topology changed: see the hand-off oracle for what must be equal",
    "seeds": "the seeds changed: dropout masks and sample order differ",
    "environment": "the environment changed: rule it out before blaming the job",
}
"""The sections of a run manifest and what a change in each of them calls for."""

_ENVIRONMENT_PREFIXES = ("NCCL_", "TORCH_", "PYTORCH_", "CUBLAS_", "OMP_", "MKL_", "CUDA_")
_VOLATILE = ("TORCHELASTIC_", "TORCH_NCCL_ASYNC_ERROR_HANDLING")


def describe(
    *, job: object, context_facts: Mapping[str, object], state: TrainingState
) -> dict[str, object]:
    """The run manifest of a job, one entry for each section of `REQUALIFY`.

    ``context_facts`` holds ``topology``, ``seed``, ``steps``, ``backend``, ``device``, ``params``.
    A job adds what only it knows through ``describe() -> dict`` with the same section names, such
    as ``data`` and ``tokenizer``.
    """
    facts = dict(context_facts)
    device = facts.get("device")
    own = job.describe() if hasattr(job, "describe") else {}
    sections: dict[str, object] = {
        "code": _source_digest(job),
        "data": None,
        "tokenizer": None,
        "optimizer": [one.rule for one in state.optimizers],
        "schedule": {"steps": facts.get("steps"), "params": facts.get("params")},
        "precision": sorted(
            {str(t.dtype).removeprefix("torch.") for t in module_tensors(state.model).values()}
        ),
        "kernels": {
            "torch": str(torch.__version__),
            "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "cudnn": torch.backends.cudnn.version() if device == "cuda" else None,
        },
        "communication": facts.get("backend"),
        "topology": facts.get("topology"),
        "seeds": facts.get("seed"),
        "environment": {
            "python": platform.python_version(),
            "system": platform.system(),
            "variables": _environment(),
        },
    }
    return sections | own


def changes_between(saved: Mapping[str, object], now: Mapping[str, object]) -> tuple[str, ...]:
    """The sections that differ, in the order of `REQUALIFY`; sections of jobs come last."""
    names = [*REQUALIFY, *sorted((saved.keys() | now.keys()) - REQUALIFY.keys())]
    return tuple(name for name in names if saved.get(name) != now.get(name))


def explain(changed: Iterable[str]) -> list[str]:
    """One sentence for each changed section."""
    unknown = "the job itself must say what this calls for"
    return [f"{name}: {REQUALIFY.get(name, unknown)}" for name in changed]


def _source_digest(job: object) -> str | None:
    try:
        file = inspect.getsourcefile(type(job))
        content = Path(file).read_bytes() if file else b""
    except (TypeError, OSError):
        return None
    return hashlib.sha256(content).hexdigest()


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_ENVIRONMENT_PREFIXES) and not name.startswith(_VOLATILE)
    }
