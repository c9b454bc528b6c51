"""The bundled job: a byte-level GPT trained with everything that a restore can get wrong.

AdamW with two parameter groups, warm-up and cosine LR, a grad scaler that grows during the run,
fp16 autocast (on a GPU), gradient clipping and accumulation, dropout, an augmentation that draws
from Python and NumPy, and an epoch of 150 samples in batches of 16, so the last batch of an epoch
is uneven.

Guarantees: the loss is the mean over the tokens of the global batch, whatever the number of ranks
(shares may be uneven or empty); a run resumed from its `TrainingState` on the same topology equals
the uninterrupted one bitwise.

Topologies: `seatrial.plugins.jobs.gpt_config.check_topology` says which; how the one model runs on
each is `seatrial.plugins.jobs.parallel`. On CUDA, ``build`` switches deterministic algorithms on
for the whole process.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import numpy.random

# torch imports these two when the first optimizer and the first FSDP2 module run, which takes most
# of a second; here, a warm parent pays once for all ranks that it forks.
import torch._dynamo
import torch.distributed as dist
import torch.profiler
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from seatrial.chaos.launch.context import RankContext
from seatrial.recovery.fingerprint import fingerprint
from seatrial.recovery.sampler import ShuffleSampler, rank_share
from seatrial.recovery.state import TrainingState
from seatrial.recovery.topology import Topology

from .gpt_config import GPTConfig, check_topology
from .model import GPT, VOCABULARY
from .options import parse_options
from .parallel.distributed import adamw, distribute
from .parallel.pipeline import IGNORED, Pipeline
from .parallel.place import Place
from .protocol import StepReport
from .text import ByteWindows, load_text


class GPTJob:
    """A `seatrial.plugins.jobs.protocol.Job`. Options are the fields of `GPTConfig`.

    Raises:
        UsageError: an unknown option, or a value that does not fit its type.
    """

    def __init__(self, **options: object) -> None:
        self.config = parse_options(GPTConfig, options, job="gpt")
        self.samples_per_epoch = self.config.samples

    def build(self, context: RankContext) -> TrainingState:
        """Build model, optimizer, schedule, scaler and sampler for this rank.

        Raises:
            TopologyError: the model cannot be put on the topology.
            TextError: the text cannot be read or is too short.
        """
        config, device = self.config, context.device
        self._device = device
        topology = Topology.parse(context.topology)
        topology.require(context.world_size)
        check_topology(config, topology)
        self._place = Place(topology, context.rank)
        if device.type == "cuda":
            _make_cuda_deterministic(device)
        self._text = load_text(config.text)
        self._data = ByteWindows(self._text, context=config.context, num_samples=config.samples)
        # The same initial weights on every rank and every topology.
        torch.default_generator.manual_seed(context.seed)
        model = _gpt(config).to(device)
        self._on = distribute(
            model,
            self._place,
            device_type=device.type,
            context=config.context,
            bucket_mb=config.bucket_mb,
        )
        self._model = self._on.model
        self._optimizer = adamw(
            self._place, self._model.parameters(), lr=config.lr, weight_decay=config.weight_decay
        )
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._optimizer, _schedule(config))
        self._scaler = _grad_scaler(config, device.type, self._on.scaler)
        self._sampler = ShuffleSampler(
            num_samples=config.samples, seed=context.seed, batch_size=config.batch
        )
        stages = self._on.stages
        self._pipeline = None if stages is None else self._make_pipeline(context, stages)
        if isinstance(self._model, DistributedDataParallel):
            self._settle_buckets(context)
        # Only now, so that nothing above, and no throw-away step, leaves a trace in the streams.
        self._place.seed(context.seed)
        return TrainingState(
            model=self._model,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            scaler=self._scaler if config.amp else None,
            sampler=self._sampler,
            seed=context.seed,
            parameter_groups=self._on.parameter_groups,
            stream_owners=self._place.streams,
        )

    def step(self, context: RankContext) -> StepReport:
        """One optimizer step over ``accumulation`` micro-batches of this rank's share."""
        config = self.config
        with context.phase("data"):
            epoch, batch = self._sampler.next_batch()
            place = self._place
            mine = rank_share(batch, rank=place.data_index, world_size=place.data_size)
            micro_batches = [self._load(part, context) for part in self._split(mine)]
        self._tokens = tokens = len(batch) * config.context
        loss_sum = torch.zeros((), dtype=torch.float64, device=context.device)
        if self._pipeline is not None:
            loss_sum += self._run_pipeline(self._pipeline, micro_batches)
            micro_batches = []
        for number, (windows, weight) in enumerate(micro_batches, start=1):
            with self._gradient_sync(number == config.accumulation):
                with context.phase("forward"):
                    share = self._loss_sum(windows, context) * weight / tokens
                with context.phase("backward"):
                    # DDP and FSDP average over ranks; the loss wants their sum.
                    torch.autograd.backward(self._scaler.scale(share * place.averaged_over))
            loss_sum += share.detach()
        with context.phase("optimizer"):
            self._update()
            if not place.reports_loss:
                loss_sum.zero_()
            dist.all_reduce(loss_sum)
        samples = mine.tolist() if place.reports_samples else []
        return StepReport(loss=float(loss_sum), epoch=epoch, samples=samples, tokens=tokens)

    def describe(self) -> dict[str, object]:
        """What only this job knows of its run, for the run manifest; call it after `build`."""
        config = self.config
        return {
            "data": {
                "text": hashlib.sha256(self._text).hexdigest(),
                "samples": config.samples,
                "context": config.context,
            },
            "tokenizer": "bytes",
            "precision": (
                "float32 with float16 autocast"
                if config.autocasts(self._device.type)
                else "float32"
            ),
        }

    def _split(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return indices.tensor_split(self.config.accumulation)

    def _load(self, indices: torch.Tensor, context: RankContext) -> tuple[torch.Tensor, float]:
        """Augmented windows ``[n, context + 1]`` and their weight in the loss.

        Without a sample the rank still runs the model, on one window of weight 0: collectives wait
        for every rank.
        """
        windows = self._data.batch(indices if len(indices) else torch.zeros(1, dtype=torch.int64))
        for row in range(len(indices)):
            if numpy.random.random() < self.config.augment:
                position = int(numpy.random.randint(windows.shape[1]))
                windows[row, position] = random.randrange(VOCABULARY)
        return windows.to(context.device), 1.0 if len(indices) else 0.0

    def _loss_sum(self, windows: torch.Tensor, context: RankContext) -> torch.Tensor:
        kind = context.device.type
        with torch.autocast(kind, dtype=torch.float16, enabled=self.config.autocasts(kind)):
            logits = self._model(windows[:, :-1][:, self._on.positions])
        return _cross_entropy(logits, windows[:, 1:][:, self._on.positions])

    def _make_pipeline(self, context: RankContext, stages: dist.ProcessGroup) -> Pipeline:
        config, place = self.config, self._place
        # Before the first loss, which only the last stage has, every stage asks for the scale.
        self._scaler.scale(torch.zeros((), device=context.device))
        share = -(-config.batch // place.data_size)
        return Pipeline(
            self._on.core,
            context,
            stages,
            micro_batches=config.accumulation,
            rows=-(-share // config.accumulation),
            length=config.context,
            width=config.width,
            autocast=config.autocasts(context.device.type),
            loss=lambda logits, targets: _cross_entropy(logits, targets) / self._tokens,
            scale=lambda loss: self._scaler.scale(loss * place.averaged_over),
        )

    def _run_pipeline(
        self, pipeline: Pipeline, micro_batches: list[tuple[torch.Tensor, float]]
    ) -> torch.Tensor:
        inputs = [windows[:, :-1] for windows, _ in micro_batches]
        targets = [
            windows[:, 1:] if weight else torch.full_like(windows[:, 1:], IGNORED)
            for windows, weight in micro_batches
        ]
        loss_sum = pipeline.run(inputs, targets)
        if self._on.tied_weights is not None:
            self._on.tied_weights.add_up()
        return loss_sum

    def _update(self) -> None:
        self._scaler.unscale_(self._optimizer)
        self._on.clip(self.config.clip)
        before = self._scaler.get_scale()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        # A smaller scale means that the step was skipped; the schedule counts steps taken.
        if self._scaler.get_scale() >= before:
            self._scheduler.step()

    @contextlib.contextmanager
    def _gradient_sync(self, wanted: bool) -> Iterator[None]:
        model = self._model
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(wanted)
        quiet: AbstractContextManager[None] = contextlib.nullcontext()
        if isinstance(model, DistributedDataParallel) and not wanted:
            quiet = model.no_sync()
        with quiet:
            yield

    def _settle_buckets(self, context: RankContext) -> None:
        """Throw one batch away, so that DDP regroups its gradient buckets before any real step.

        DDP regroups them after the first backward of a process, in the order in which gradients
        became ready. The order decides which rank adds first in an all-reduce over 3 or more ranks,
        so a resumed process, whose first step is another one, would round otherwise. The graph must
        be the real one: same autocast, same shapes.
        """
        whole = torch.arange(self.config.batch) % len(self._data)
        mine = rank_share(whole, rank=context.rank, world_size=context.world_size)
        windows, weight = self._load(self._split(mine)[0], context)
        torch.autograd.backward(self._loss_sum(windows, context) * weight)
        # The regrouping happens in the next forward. Outside no_sync DDP would expect its backward
        # too, take that of the first accumulated micro-batch for it, and so reduce twice in the
        # first step: other rounding than in every later step, and a resume that is not bitwise.
        with self._gradient_sync(False):
            self._loss_sum(windows, context)
        self._optimizer.zero_grad(set_to_none=True)


def warm_up() -> None:
    """One step of the default model, in the process that ranks are forked from.

    Compiles the CPU kernels, reads the default text and fills torch's caches once, where every rank
    of every attempt would do so again. A torch built for CUDA is left alone: its autograd starts a
    thread for each GPU, and threads do not survive a fork.
    """
    if torch.backends.cuda.is_built():
        return
    load_text()
    config = GPTConfig()
    model = _gpt(config)
    place = Place(Topology.parse("dp1"), 0)
    optimizer = adamw(place, model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    scaler = _grad_scaler(config, "cpu", torch.amp.GradScaler)
    tokens = torch.zeros((config.batch // 4, config.context), dtype=torch.int64)
    logits = model(tokens)
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
    torch.autograd.backward(scaler.scale(loss))
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    scaler.step(optimizer)
    scaler.update()
    # The keys of a fingerprint are kept, and a rank's are the same.
    fingerprint(TrainingState(model=model, optimizer=optimizer), rank=0)


def _gpt(config: GPTConfig) -> GPT:
    return GPT(
        width=config.width,
        layers=config.layers,
        heads=config.heads,
        context=config.context,
        dropout=config.dropout,
        tied=config.tied,
        experts=config.experts,
    )


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed over tokens; targets of `IGNORED` count nothing."""
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.reshape(-1), ignore_index=IGNORED, reduction="sum"
    )


def _grad_scaler(
    config: GPTConfig, device: str, kind: type[torch.amp.GradScaler]
) -> torch.amp.GradScaler:
    return kind(
        device,
        init_scale=config.init_scale,
        growth_interval=config.growth_interval,
        enabled=config.amp,
    )


def _schedule(config: GPTConfig) -> Callable[[int], float]:
    def factor(step: int) -> float:
        if step < config.warmup:
            return (step + 1) / config.warmup
        done = min(1.0, (step - config.warmup) / max(1, config.decay_steps - config.warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return factor


def _make_cuda_deterministic(device: torch.device) -> None:
    # cuBLAS reads it when its first handle is made (CUDA documentation, results reproducibility).
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)
