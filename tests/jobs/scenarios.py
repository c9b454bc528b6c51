"""What real ranks do in the tests of the GPT job. Run as a program, it forks them on request.

Reads lines ``["scenario", "topology", "directory", {"option": "value"}]`` and answers each with the
exit status. Every rank writes what its scenario returns to ``rank<r>.json`` in the directory, and
what it prints to ``errors``. Ranks are forked from this clean process, which has imported all it
needs, and not from pytest, whose threads would not survive a fork.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.simplefilter("error")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import (  # noqa: E402
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from seatrial.chaos.launch.context import RankContext  # noqa: E402
from seatrial.chaos.trace import TraceWriter  # noqa: E402
from seatrial.plugins.jobs.gpt import GPTJob  # noqa: E402
from seatrial.plugins.jobs.handoff import hand_off, take_over  # noqa: E402
from seatrial.recovery.checkpointable import TensorFacts  # noqa: E402
from seatrial.recovery.collectives import observe  # noqa: E402
from seatrial.recovery.fingerprint import Fingerprinter  # noqa: E402
from seatrial.recovery.plain import dumps, loads  # noqa: E402
from seatrial.recovery.probe import listen  # noqa: E402
from seatrial.recovery.state import TrainingState  # noqa: E402
from seatrial.recovery.store import CheckpointStore  # noqa: E402
from seatrial.recovery.topology import Topology  # noqa: E402

Options = dict[str, str]
Captured = tuple[dict[str, torch.Tensor], dict[str, Any], dict[int, Any]]


def capture(state: TrainingState) -> Captured:
    """Full tensors, shared objects, and everybody's rank objects, independent of the state."""
    tensors = {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in state.tensors().items()
    }
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, dumps(state.rank_objects()))
    shared: Any = loads(dumps(state.shared_objects()))
    return tensors, shared, {rank: loads(own) for rank, own in enumerate(everybody)}


def put_back(state: TrainingState, captured: Captured) -> None:
    tensors, shared, ranks = captured
    state.prepare({n: TensorFacts(dtype=t.dtype, shape=tuple(t.shape)) for n, t in tensors.items()})
    live = state.tensors()
    assert set(live) == set(tensors)
    with torch.no_grad():
        for name, tensor in tensors.items():
            target = live[name]
            if isinstance(target, DTensor):
                tensor = distribute_tensor(tensor, target.device_mesh, target.placements)
            target.copy_(tensor)
    state.load_objects(shared, ranks, dist.get_rank())


def advance(job: GPTJob, state: TrainingState, context: RankContext, steps: int) -> list[Any]:
    """One record a step, with everything that a resumed run must repeat."""
    fingerprinter = Fingerprinter(rank=context.rank)
    records: list[Any] = [{"fingerprint": fingerprinter(state).to_json()}]
    for _ in range(steps):
        report = job.step(context)
        state.progress.step += 1
        records.append(
            {
                "loss": report.loss.hex(),
                "epoch": report.epoch,
                "samples": list(report.samples),
                "tokens": report.tokens,
                "lr": state.learning_rates(),
                "scale": state.loss_scale(),
                "moment": _first_moment(state),
                "fingerprint": fingerprinter(state).to_json(),
            }
        )
    return records


def _first_moment(state: TrainingState) -> float:
    """The norm of AdamW's running gradient; unlike its updates it scales with the gradient."""
    moments = [t for name, t in state.tensors().items() if name.endswith("/exp_avg")]
    full = [t.full_tensor() if isinstance(t, DTensor) else t for t in moments]
    return math.sqrt(sum(float(t.double().square().sum()) for t in full))


def train(context: RankContext, options: Options) -> object:
    steps = int(options.pop("steps"))
    job = GPTJob(**options)
    return advance(job, job.build(context), context, steps)


def moments(context: RankContext, options: Options) -> object:
    """Losses of three steps, and by parameter the norm of AdamW's running gradient after them.

    Unlike the updates it scales with the gradient.
    """
    job = GPTJob(**options)
    state = job.build(context)
    losses = [float(record["loss"]) for record in _as_floats(advance(job, state, context, 3)[1:])]
    norms = {}
    for name, tensor in state.tensors().items():
        if name.endswith("/exp_avg"):
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            norms[name] = float(full.double().norm())
    return {"losses": losses, "moments": norms}


def _as_floats(records: list[Any]) -> list[Any]:
    return [{**record, "loss": float.fromhex(record["loss"])} for record in records]


def overflow(context: RankContext, options: Options) -> object:
    """One step whose gradient overflows on the last rank alone; the state before and after."""
    job = GPTJob(**options)
    state = job.build(context)
    fingerprinter = Fingerprinter(rank=context.rank)
    before = fingerprinter(state).to_json()
    weight = next(p for n, p in job._on.core.named_parameters() if "query_key_value.weight" in n)
    if context.rank == context.world_size - 1:
        weight.register_post_accumulate_grad_hook(_spoil)
    job.step(context)
    return {"before": before, "after": fingerprinter(state).to_json(), "scale": state.loss_scale()}


def _spoil(parameter: torch.Tensor) -> None:
    grad = parameter.grad
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    assert local is not None
    local.view(-1)[0] = math.inf


def meshes(context: RankContext, _options: Options) -> object:
    """The members of this rank's group along every dimension of the mesh."""
    mesh = Topology.parse(context.topology).mesh("cpu")
    names = mesh.mesh_dim_names or ()
    return {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in names}


def prove(context: RankContext, options: Options) -> object:
    """Everything that one launch can show of a topology, because the first steps are the slow ones.

    ``plain`` and ``clipped`` are `moments` of runs in which nothing is random.
    """
    still = {**options, "dropout": "0", "augment": "0", "amp": "false"}
    return {
        "meshes": meshes(context, {}),
        "plain": moments(context, {**still, "clip": "1e9"}),
        "clipped": moments(context, {**still, "clip": "0.05"}),
        "overflow": overflow(context, dict(options)),
        "phases": phases(context, dict(options)),
        "resume": resume(context, {**options, "before": "2", "after": "2"}),
    }


def resume(context: RankContext, options: Options) -> object:
    """The second part of a run, and the same part again in a job that was built anew."""
    before, after = int(options.pop("before", "4")), int(options.pop("after", "5"))
    first = GPTJob(**options)
    state = first.build(context)
    advance(first, state, context, before)
    captured = capture(state)
    uninterrupted = advance(first, state, context, after)
    second = GPTJob(**options)
    state = second.build(context)
    put_back(state, captured)
    return {"uninterrupted": uninterrupted, "resumed": advance(second, state, context, after)}


def reshard(context: RankContext, options: Options) -> object:
    """A state of DDP ranks put back into FSDP2 ranks."""
    job = GPTJob(**options)
    state = job.build(context)
    before = advance(job, state, context, 3)[-1]["fingerprint"]
    captured = capture(state)
    sharded = RankContext(**{**vars(context), "topology": f"fsdp{context.world_size}"})
    state = GPTJob(**options).build(sharded)
    put_back(state, captured)
    return {"before": before, "after": Fingerprinter(rank=context.rank)(state).to_json()}


def save(context: RankContext, options: Options) -> object:
    """A run that stops after ``steps`` steps; its state is saved and handed off."""
    steps, directory = int(options.pop("steps")), Path(options.pop("directory"))
    job = GPTJob(**options)
    state = job.build(context)
    records = advance(job, state, context, steps)
    CheckpointStore(directory / "store", topology=context.topology).save(state, step=steps)
    hand_off(state, directory / "handoff", rank=context.rank)
    return records


def take_over_all(context: RankContext, options: Options) -> object:
    """For each run that `save` saved: restored, and handed over, and ``steps`` steps from each.

    ``sources`` are the runs' directories, with the options that their job had.
    """
    steps, sources = int(options["steps"]), json.loads(options["sources"])
    found = {}
    for directory, job_options in sources.items():
        run = {}
        for way in ("restored", "handed"):
            job = GPTJob(**job_options)
            state = job.build(context)
            if way == "restored":
                store = CheckpointStore(Path(directory) / "store", topology=context.topology)
                assert store.restore(state) is not None
            else:
                take_over(state, Path(directory) / "handoff", rank=context.rank)
            run[way] = advance(job, state, context, steps)
            run["notes"] = run.get("notes", state.notes)
        found[directory] = run
    return found


def forget_tied(context: RankContext, options: Options) -> object:
    """A run that `save` saved, restored; then one of two copies of the embedding is lost."""
    job = GPTJob(**{name: value for name, value in options.items() if name != "source"})
    state = job.build(context)
    store = CheckpointStore(Path(options["source"]) / "store", topology=context.topology)
    assert store.restore(state) is not None
    fingerprinter = Fingerprinter(rank=context.rank)
    restored = fingerprinter(state).to_json()
    if context.rank == context.world_size - 1:
        with torch.no_grad():
            state.tensors()["model/token_embedding.weight"].zero_()
    return {"restored": restored, "forgotten": fingerprinter(state).to_json()}


def layouts(context: RankContext, _options: Options) -> object:
    """Fingerprints of tensors whole and cut in every way a 2x2 mesh allows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(0)
    whole, cut = {}, {}
    ways: list[Placement] = [Replicate(), Shard(0), Shard(1)]
    for shape in [(5, 7), (1, 3), (4, 4), (3, 2, 5), (2, 0)]:
        for dtype in (torch.float32, torch.bfloat16, torch.complex64):
            tensor = torch.randn(shape).to(dtype)
            for a in ways:
                for b in ways:
                    name = f"model/{shape}{dtype}{a}{b}"
                    whole[name] = tensor
                    cut[name] = distribute_tensor(tensor, mesh, [a, b])
    fingerprinter = Fingerprinter(rank=context.rank)
    return {
        kind: {
            "rank": context.rank, "tensors": fingerprinter.tensors(t), "shared": {}, "own": {},
        }
        for kind, t in (("whole", whole), ("cut", cut))
    }  # fmt: skip


def partial(context: RankContext, _options: Options) -> object:
    """Reading the state in the middle: a forward pass without a backward leaves FSDP gathered."""
    job = GPTJob()
    state = job.build(context)
    before = Fingerprinter(rank=context.rank)(state).to_json()
    with torch.no_grad():
        state.model.eval()
        state.model(torch.zeros((1, 4), dtype=torch.int64))
    return {"before": before, "after": Fingerprinter(rank=context.rank)(state).to_json()}


def phases(context: RankContext, options: Options) -> object:
    job = GPTJob(**options)
    job.build(context)
    seen: list[str] = []
    stop = listen(lambda event, edge, _facts: seen.append(event) if edge == "before" else None)
    job.step(context)
    stop()
    return seen


def _rank(scenario: str, topology: str, directory: Path, options: Options, rank: int) -> None:
    world_size = Topology.parse(topology).world_size
    observer = observe()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    context = RankContext(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        node=0,
        attempt=1,
        seed=7,
        topology=topology,
        device=torch.device("cpu"),
        store=str(directory / "store"),
        directory=directory,
        timeout_s=60.0,
        trace=TraceWriter(directory / f"rank{rank}.trace"),
        observer=observer,
    )
    result = globals()[scenario](context, dict(options))
    (directory / f"rank{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _fork(scenario: str, topology: str, directory: Path, options: Options, rank: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        errors = os.open(directory / "errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        _rank(scenario, topology, directory, options, rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Not sys.exit: a forked child must not run its parent's cleanup.
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        scenario, topology, directory, options = json.loads(line)
        ranks = range(Topology.parse(topology).world_size)
        children = [_fork(scenario, topology, Path(directory), options, rank) for rank in ranks]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    serve()
