"""Pipeline parallelism: the model cut into stages, run by torch's 1F1B schedule.

Guarantees: stages keep the model's global names; every micro-batch announces its forward and its
backward phase on every stage; tied weights, which the first stage and the last both have, stay
equal, because both add up their gradients. No random number is drawn besides the model's own: the
shapes that stages exchange are told, not found out by running the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor

from seatrial.chaos.launch.context import RankContext

from ..model import GPT, VOCABULARY
from .place import Place

IGNORED = -100
"""The target of a row that only pads a micro-batch to its full size (``cross_entropy``)."""


def cut(model: GPT, place: Place) -> None:
    """Remove what other stages have, in place. Layers are spread evenly, in order."""
    tied = model.head.weight is model.token_embedding.weight
    stages = place.topology.size("pp")
    kept = set(torch.arange(len(model.layers)).tensor_split(stages)[place.at("pp")].tolist())
    for name in list(model.layers):
        if int(name) not in kept:
            del model.layers[name]
    model.embeds, model.predicts = place.is_first_stage, place.is_last_stage
    if not model.embeds:
        del model.position_embedding
        # Tied output weights bear the name of the embedding.
        if not (tied and model.predicts):
            del model.token_embedding
    if not model.predicts:
        del model.head, model.final_norm


class TiedWeights:
    """Adds up the gradients of the weights that the first and the last stage share.

    Making one is a collective over all ranks.
    """

    def __init__(self, model: GPT, place: Place) -> None:
        ends = [[stages[0], stages[-1]] for stages in place.topology.groups("pp")]
        self._group, _ = dist.new_subgroups_by_enumeration(ends)
        self._weight = model.token_embedding.weight if model.embeds or model.predicts else None

    def add_up(self) -> None:
        if self._weight is not None and self._weight.grad is not None:
            grad = self._weight.grad
            dist.all_reduce(
                grad.to_local() if isinstance(grad, DTensor) else grad, group=self._group
            )


class Pipeline:
    """One stage of a schedule that runs all micro-batches of a step, forward and backward.

    ``rows`` is the size of a micro-batch; smaller ones are padded. ``loss`` turns logits and
    targets into the loss of a micro-batch, unscaled; ``scale`` prepares it for the backward.
    """

    def __init__(
        self,
        model: GPT,
        context: RankContext,
        group: dist.ProcessGroup,
        *,
        micro_batches: int,
        rows: int,
        length: int,
        width: int,
        autocast: bool,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        scale: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        device = context.device
        self._rows, self._model, self._device = rows, model, device
        self._losses: list[torch.Tensor] = []

        def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            value = loss(logits, targets)
            self._losses.append(value.detach())
            return scale(value)

        hidden = torch.empty((rows, length, width), device=device, requires_grad=True)
        tokens = torch.empty((rows, length), dtype=torch.int64, device=device)
        logits = hidden.new_empty(
            (rows, length, VOCABULARY), dtype=torch.float16 if autocast else torch.float32
        ).requires_grad_()
        stage = _Stage(
            model,
            dist.get_rank(group),
            dist.get_world_size(group),
            device,
            input_args=tokens if model.embeds else hidden,
            output_args=logits if model.predicts else hidden,
            group=group,
        )
        stage.context, stage.autocast = context, autocast
        self._schedule = Schedule1F1B(stage, micro_batches, loss_fn=loss_of, scale_grads=False)

    def run(self, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> torch.Tensor:
        """All micro-batches of one step; returns the sum of their losses, 0 before the last stage.

        Inputs and targets are int64 ``[n, length]``, n up to ``rows``, one for each micro-batch.
        """
        self._losses.clear()
        arguments: list[Any] = [self._padded(inputs, 0)] if self._model.embeds else []
        target = self._padded(targets, IGNORED) if self._model.predicts else None
        self._schedule.step(*arguments, target=target, return_outputs=False)
        return sum(self._losses, torch.zeros((), device=self._device))

    def _padded(self, parts: Sequence[torch.Tensor], value: int) -> torch.Tensor:
        return torch.cat(
            [
                torch.nn.functional.pad(part, (0, 0, 0, self._rows - len(part)), value=value)
                for part in parts
            ]
        )


class _Stage(PipelineStage):
    """Announces the phases. Autocast is for the forward alone, as without a pipeline."""

    context: RankContext
    autocast: bool

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with (
            self.context.phase("forward"),
            torch.autocast(self.device.type, dtype=torch.float16, enabled=self.autocast),
        ):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.context.phase("backward"):
            return super().backward_one_chunk(*args, **kwargs)
