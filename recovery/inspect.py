"""What a checkpoint directory holds, without torch and without the job that wrote it.

Guarantees: every digest of every published step is checked again, and nothing is written, so a
supervisor may look while no rank is saving. Does not import torch. Anyone may call it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from .directory import CheckpointDirectory
from .errors import CheckpointError
from .files import file_problems

__all__ = ["StepReport", "StoreReport", "inspect_store", "step_problems"]


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step's directory. ``valid`` means published and every byte as it was saved."""

    step: int
    published: bool
    valid: bool
    problems: tuple[str, ...] = ()
    attempt: str | None = None
    parent_step: int | None = None
    topology: str | None = None
    world_size: int | None = None
    writer: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StoreReport:
    """All steps, lowest first; ``leftovers`` relative to the directory, ``quarantined`` by name."""

    steps: tuple[StepReport, ...]
    leftovers: tuple[str, ...]
    quarantined: tuple[str, ...]

    @property
    def latest_valid(self) -> int | None:
        """The highest valid step."""
        return max((report.step for report in self.steps if report.valid), default=None)

    @property
    def latest_published(self) -> int | None:
        """The highest published step, valid or not."""
        return max((report.step for report in self.steps if report.published), default=None)


def inspect_store(
    directory: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, object] | None = None,
    single_writer: bool = False,
) -> StoreReport:
    """Read and verify everything in ``directory``, a path or URL; an absent one is empty."""
    store = CheckpointDirectory.at(
        directory, storage_options=storage_options, single_writer=single_writer
    )
    return StoreReport(
        steps=tuple(_inspect_step(store, step) for step in store.storage.steps()),
        leftovers=tuple(store.storage.leftovers()),
        quarantined=tuple(store.storage.quarantined()),
    )


def step_problems(store: CheckpointDirectory, step: int) -> list[str]:
    """Every problem of the published ``step``; empty if all its bytes are as saved."""
    if not store.storage.is_published(step):
        return [f"step {step} is not published in {store.location}"]
    return list(_inspect_step(store, step).problems)


def _inspect_step(store: CheckpointDirectory, step: int) -> StepReport:
    if not store.storage.is_published(step):
        return StepReport(step=step, published=False, valid=False)
    try:
        manifest = store.read_manifest(step).manifest
    except (CheckpointError, OSError) as error:
        return StepReport(step=step, published=True, valid=False, problems=(str(error),))
    problems = tuple(file_problems(store.files(manifest), manifest))
    return StepReport(
        step=step,
        published=True,
        valid=not problems,
        problems=problems,
        attempt=manifest.attempt,
        parent_step=manifest.parent_step,
        topology=manifest.topology,
        world_size=manifest.world_size,
        writer=manifest.writer,
    )
