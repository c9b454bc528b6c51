"""The bundled job: a byte-level GPT trained with everything that a restore can get wrong.

AdamW with two parameter groups, warm-up and cosine LR, fp16 autocast with a grad scaler that grows
during the run, gradient clipping and accumulation, dropout, an augmentation that draws from Python
and NumPy, and an epoch of 150 samples in batches of 16, so the last batch of an epoch is uneven.

Guarantees: the loss is the mean over the tokens of the global batch, whatever the number of ranks
(shares may be uneven or empty); a run resumed from its `TrainingState` on the same topology equals
the uninterrupted one bitwise, on any number of DDP or FSDP2 ranks.

Topologies: ``dpN`` (DDP) and ``fsdpN`` (FSDP2, one group per block). On CUDA, ``build`` switches
deterministic algorithms on for the whole process.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from seatrial.chaos.launch.context import RankContext
from seatrial.recovery.fingerprint import fingerprint
from seatrial.recovery.rng import seed_everything
from seatrial.recovery.sampler import ShuffleSampler, rank_share
from seatrial.recovery.state import TrainingState
from seatrial.recovery.topology import Topology

from .gpt_config import GPTConfig, strategy_of
from .model import GPT, VOCABULARY
from .options import parse_options
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
            TopologyError: the topology has a dimension besides ``dp`` or ``fsdp``, or both.
            TextError: the text cannot be read or is too short.
        """
        config, device = self.config, context.device
        Topology.parse(context.topology).require(context.world_size)
        strategy = strategy_of(context.topology)
        if device.type == "cuda":
            _make_cuda_deterministic(device)
        self._text = load_text(config.text)
        self._data = ByteWindows(self._text, context=config.context, num_samples=config.samples)
        # The same initial weights on every rank and every topology.
        torch.default_generator.manual_seed(context.seed)
        model = _gpt(config).to(device)
        self._model = _distribute(model, strategy, context)
        self._optimizer = _adamw(self._model, config)
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._optimizer, _schedule(config))
        self._scaler = _grad_scaler(config, device.type)
        self._sampler = ShuffleSampler(
            num_samples=config.samples, seed=context.seed, batch_size=config.batch
        )
        if isinstance(self._model, DistributedDataParallel):
            self._settle_buckets(context)
        # Only now, so that nothing above, and no throw-away step, leaves a trace in the streams.
        seed_everything(context.seed, context.rank)
        return TrainingState(
            model=self._model,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            scaler=self._scaler if config.amp else None,
            sampler=self._sampler,
            seed=context.seed,
        )

    def step(self, context: RankContext) -> StepReport:
        """One optimizer step over ``accumulation`` micro-batches of this rank's share."""
        config = self.config
        with context.phase("data"):
            epoch, batch = self._sampler.next_batch()
            mine = rank_share(batch, rank=context.rank, world_size=context.world_size)
            micro_batches = [self._load(part, context) for part in self._split(mine)]
        tokens = len(batch) * config.context
        loss_sum = torch.zeros((), dtype=torch.float64, device=context.device)
        for number, (windows, weight) in enumerate(micro_batches, start=1):
            with self._gradient_sync(number == config.accumulation):
                with context.phase("forward"):
                    share = self._loss_sum(windows, context) * weight / tokens
                with context.phase("backward"):
                    # DDP and FSDP average over ranks; the loss wants their sum.
                    torch.autograd.backward(self._scaler.scale(share * context.world_size))
            loss_sum += share.detach()
        with context.phase("optimizer"):
            self._update()
            dist.all_reduce(loss_sum)
        return StepReport(loss=float(loss_sum), epoch=epoch, samples=mine.tolist(), tokens=tokens)

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
            "precision": "float32 with float16 autocast" if config.amp else "float32",
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
        with torch.autocast(context.device.type, dtype=torch.float16, enabled=self.config.amp):
            logits = self._model(windows[:, :-1])
        targets = windows[:, 1:].reshape(-1)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum")

    def _update(self) -> None:
        self._scaler.unscale_(self._optimizer)
        nn.utils.clip_grad_norm_(self._model.parameters(), self.config.clip)
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
    optimizer, scaler = _adamw(model, config), _grad_scaler(config, "cpu")
    tokens = torch.zeros((config.batch // 4, config.context), dtype=torch.int64)
    with torch.autocast("cpu", dtype=torch.float16):
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
    )


def _grad_scaler(config: GPTConfig, device: str) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(
        device,
        init_scale=config.init_scale,
        growth_interval=config.growth_interval,
        enabled=config.amp,
    )


def _distribute(model: GPT, strategy: str, context: RankContext) -> nn.Module:
    if strategy == "dp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(context.device.type, (context.world_size,), mesh_dim_names=("fsdp",))
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _adamw(model: nn.Module, config: GPTConfig) -> torch.optim.AdamW:
    """Weights decay; norms and biases, which have one dimension, do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr)


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
