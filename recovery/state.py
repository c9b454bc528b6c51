"""Everything a training run must get back, as one `Checkpointable`.

Guarantees: after `prepare`, reading into `tensors`, and `load_objects`, the model, optimizer,
scheduler, grad scaler, sampler, progress and whatever else was given equal what was saved, bitwise,
and the RNG comes last, so nothing in a restore draws from it. Names are the same on every topology.
A piece that the checkpoint lacks, or that this state lacks, is an error, never skipped.

A rank may hold a part of the model (a pipeline stage, experts, shards), under the global names.

Does not: cover several models, or RNG streams that nobody named. A stream that the checkpoint does
not hold (more ranks restore than saved) is derived from the seed, the step and whose it is, and
`TrainingState.notes` says so.

Jobs build it; checkpoint stores and fingerprints read it. One thread at a time.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol, cast

import torch

from .checkpointable import Checkpointable, TensorFacts
from .errors import StateError
from .modules import extra_states, module_tensors
from .omission import Omission
from .optimizers import OptimizerState
from .rng import BUILT_IN_STREAMS, capture_rng, derive_seed, owned_streams, restore_rng

BUILT_IN_COMPONENTS = (
    "model",
    "optimizer",
    "scheduler",
    "scaler",
    "rng",
    "sampler",
    "progress",
)
"""Component names that an ``extra`` may not take."""


class Stateful(Protocol):
    """Whatever saves itself as plain data and takes it back."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclass(kw_only=True)
class Progress:
    """How far the run has come; counts are over all ranks."""

    step: int = 0
    epoch: int = 0
    samples: int = 0
    tokens: int = 0


class TrainingState:
    """The live state of one rank.

    Args:
        model: the module as wrapped for training (DDP, FSDP2, compiled).
        optimizer: one optimizer, or several by name. Build it after wrapping the model.
        scheduler: one LR scheduler, or several by name.
        scaler: a ``torch.amp.GradScaler``.
        sampler: the data position; its state must be equal on every rank.
        generators: RNG streams besides Python's, NumPy's and torch's, by name.
        extra: more components by name. A module is saved tensor by tensor, anything else through
            ``state_dict()``, which must be plain data and equal on every rank.
        seed: decides RNG that no checkpoint holds (see `notes`).
        parameter_groups: where this rank has some of the model's parameters (a pipeline stage),
            the logical names in every group of the one optimizer, over all ranks and in one order.
        stream_owners: whose an RNG stream is, by stream, as text that holds on other topologies
            (``data 1, stage 0``). Ranks with equal text share a stream, and a restore continues the
            stream of equal text. Streams that are not named belong to the rank's number.

    Raises:
        StateError: parameter groups for several optimizers, or a component or stream name that is
            taken or contains ``/``.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
        scheduler: Stateful | Mapping[str, Stateful] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        sampler: Stateful | None = None,
        generators: Mapping[str, torch.Generator] | None = None,
        extra: Mapping[str, Stateful | torch.nn.Module] | None = None,
        seed: int = 0,
        parameter_groups: Sequence[Sequence[str]] | None = None,
        stream_owners: Mapping[str, str] | None = None,
    ) -> None:
        self.model = model
        self.scaler = scaler
        self.generators = dict(generators or {})
        self.seed = seed
        self.progress = Progress()
        self.notes: list[str] = []
        _require_free("RNG stream", self.generators, BUILT_IN_STREAMS)
        _require_free("extra component", extra or {}, BUILT_IN_COMPONENTS)

        named = optimizer if isinstance(optimizer, Mapping) else {"": optimizer}
        if parameter_groups is not None and len(named) != 1:
            raise StateError("parameter groups over all ranks can be declared for one optimizer")
        self.optimizers = tuple(
            OptimizerState(
                one,
                prefix=f"optimizer/{name}/" if name else "optimizer/",
                members=parameter_groups,
            )
            for name, one in named.items()
            if one is not None
        )
        self.stream_owners = dict(stream_owners or {})
        self._modules = {"model": model}
        # In this order they are put back; parameter groups follow, see load_objects.
        self._stateful: dict[str, Stateful] = {}
        if isinstance(scheduler, Mapping):
            self._stateful |= {f"scheduler/{name}": one for name, one in scheduler.items()}
        elif scheduler is not None:
            self._stateful["scheduler"] = scheduler
        for name, component in [("scaler", scaler), ("sampler", sampler), *(extra or {}).items()]:
            if isinstance(component, torch.nn.Module):
                self._modules[name] = component
            elif component is not None:
                self._stateful[name] = cast(Stateful, component)
        self._extra = tuple(extra or {})

    def components(self) -> tuple[str, ...]:
        """The names of the parts that this state has, ``model`` first, extras last."""
        present = {name.partition("/")[0] for name in self._stateful}
        present |= {"model", "rng", "progress", *(["optimizer"] if self.optimizers else [])}
        return (*(name for name in BUILT_IN_COMPONENTS if name in present), *self._extra)

    def modules(self) -> dict[str, torch.nn.Module]:
        """The components that are modules, by name, ``model`` first."""
        return dict(self._modules)

    def stateful(self) -> dict[str, Stateful]:
        """The components that save themselves by ``state_dict()``, by name."""
        return dict(self._stateful)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Live tensors: ``model/<fqn>``, ``optimizer/<fqn>/<key>``, ``<extra>/<fqn>``."""
        named = {component: module_tensors(module) for component, module in self._modules.items()}
        found = {f"{component}/{n}": t for component in named for n, t in named[component].items()}
        names = {tensor: name for name, tensor in named["model"].items()}
        for optimizer in self.optimizers:
            found |= optimizer.tensors(names)
        return found

    def shared_objects(self) -> dict[str, object]:
        """Plain data that is equal on every rank; later steps do not change what was returned."""
        found: dict[str, object] = {"progress": asdict(self.progress)}
        for name, component in self._stateful.items():
            found[name] = without_counters(copy.deepcopy(component.state_dict()))
        names = self.parameter_names()
        for optimizer in self.optimizers:
            found |= optimizer.objects(names)
        for component_name, module in self._modules.items():
            for name, owner in extra_states(module).items():
                found[f"{component_name}/{name}#extra_state"] = owner.get_extra_state()
        return found

    def rank_objects(self) -> dict[str, object]:
        """The RNG streams of this rank, ``rng/<stream>``."""
        streams = capture_rng(generators=self.generators)
        for name, owner in self.stream_owners.items():
            if name in streams:
                streams[name]["owner"] = owner
        return {f"rng/{name}": state for name, state in streams.items()}

    def prepare(self, stored: Mapping[str, TensorFacts]) -> None:
        """Create lazily created optimizer state that ``stored`` holds, remove what it does not."""
        names = self.parameter_names()
        for optimizer in self.optimizers:
            optimizer.prepare(stored, names)

    def load_objects(
        self, shared: Mapping[str, object], ranks: Mapping[int, Mapping[str, object]], rank: int
    ) -> None:
        """Put every plain object back, checking all of them before changing any.

        Raises:
            StateError: objects missing or left over, another grouping of parameters, or a component
                that refuses its state.
        """
        self._load_objects(shared, ranks, rank, omitted=frozenset())

    def omitting(self, names: Collection[str]) -> Checkpointable:
        """A view that restores everything except the components ``names``, for controls.

        Raises:
            StateError: a name that is not one of `components`.
        """
        unknown = sorted(set(names) - set(self.components()))
        if unknown:
            raise StateError(
                f"this state has no component {', '.join(map(repr, unknown))}; "
                f"its components are {', '.join(self.components())}"
            )
        return Omission(self, frozenset(names))

    def learning_rates(self) -> list[float]:
        """The current LR of every parameter group, in order."""
        groups = [group for one in self.optimizers for group in one.optimizer.param_groups]
        return [float(group["lr"]) for group in groups]

    def loss_scale(self) -> float | None:
        """The current loss scale; ``None`` without a grad scaler."""
        return None if self.scaler is None else float(self.scaler.get_scale())

    def parameter_names(self) -> dict[torch.Tensor, str]:
        """The logical name of every tensor of the model, without the ``model/``."""
        return {tensor: name for name, tensor in module_tensors(self.model).items()}

    def _load_objects(
        self,
        shared: Mapping[str, object],
        ranks: Mapping[int, Mapping[str, object]],
        rank: int,
        *,
        omitted: Collection[str],
    ) -> None:
        names = self.parameter_names()
        expected = {n for n in self.shared_objects() if component_of(n) not in omitted}
        given = {n: v for n, v in shared.items() if component_of(n) not in omitted}
        _require_same_names(expected, set(given))
        loads_optimizer = "optimizer" not in omitted
        for optimizer in self.optimizers if loads_optimizer else ():
            optimizer.check_groups(given[f"{optimizer.prefix}param_groups"], names)

        for name, component in self._stateful.items():
            if name in given:
                live = component.state_dict()
                _load(name, component.load_state_dict, _with_counters_of(live, given[name]))
        for component_name, module in self._modules.items():
            for name, owner in extra_states(module).items():
                full_name = f"{component_name}/{name}#extra_state"
                if full_name in given:
                    _load(full_name, owner.set_extra_state, given[full_name])
        # After the schedulers: loading one may write a learning rate into the groups.
        for optimizer in self.optimizers if loads_optimizer else ():
            optimizer.load_groups(cast(Any, given[f"{optimizer.prefix}param_groups"]))
            other = cast(Any, given[f"{optimizer.prefix}other_state"])
            optimizer.load_other_state(other, names)
        if "progress" not in omitted:
            saved = cast(dict[str, int], given["progress"])
            for field in fields(self.progress):
                setattr(self.progress, field.name, saved[field.name])
        # Last, because any of the above is somebody's code and may draw.
        if "rng" not in omitted:
            self._load_rng(ranks, rank, step=cast(dict[str, int], shared["progress"])["step"])

    def _load_rng(self, ranks: Mapping[int, Mapping[str, object]], rank: int, *, step: int) -> None:
        def fallback(stream: str) -> int:
            owner = self.stream_owners.get(stream)
            where = f"resume/{step}" + (f"/{owner}" if owner else "")
            return derive_seed(self.seed, where, 0 if owner else rank)

        saved = owned_streams(ranks, rank, self.stream_owners)
        derived = restore_rng(saved, generators=self.generators, fallback_seed=fallback)
        for owner in sorted({self.stream_owners.get(name, "the rank") for name in derived}):
            streams = [n for n in derived if self.stream_owners.get(n, "the rank") == owner]
            self.notes.append(
                f"rank {rank}: the checkpoint of step {step} holds no RNG state for "
                f"{', '.join(streams)} ({len(ranks)} ranks saved); derived from seed {self.seed}, "
                f"the step and {owner}"
            )


def component_of(name: str) -> str:
    """The component of a tensor or object: what stands before the first ``/``."""
    return name.partition("/")[0]


def without_counters(state: Any) -> Any:
    """``MultiStepLR`` keeps its milestones in a ``Counter``; plain data knows only ``dict``.

    Other schedulers hold its state in theirs: ``SequentialLR`` and ``ChainedScheduler``, in a list.
    """
    if type(state) in (dict, Counter):
        return {key: without_counters(value) for key, value in state.items()}
    return [without_counters(each) for each in state] if type(state) is list else state


def _with_counters_of(live: Any, saved: Any) -> Any:
    if type(live) is Counter and type(saved) is dict:
        return Counter(saved)
    if type(live) is dict and type(saved) is dict:
        return {key: _with_counters_of(live.get(key), value) for key, value in saved.items()}
    if type(live) is list and type(saved) is list and len(live) == len(saved):
        return [_with_counters_of(*each) for each in zip(live, saved, strict=True)]
    return saved


def _load(name: str, load: Any, saved: object) -> None:
    try:
        # A copy, because load_state_dict may keep what it is given and change it later.
        load(copy.deepcopy(saved))
    except StateError:
        raise
    except Exception as error:
        raise StateError(
            f"{name} refused the state that was saved for it "
            f"({type(error).__name__}: {error}); build it as it was when the checkpoint was saved"
        ) from error


def _require_same_names(expected: set[str], given: set[str]) -> None:
    missing, left_over = sorted(expected - given), sorted(given - expected)
    if missing or left_over:
        lacks = f"it lacks {', '.join(missing)}" if missing else ""
        holds = f"it also holds {', '.join(left_over)}" if left_over else ""
        raise StateError(
            "the checkpoint's objects do not fit the state to restore: "
            f"{' and '.join(filter(None, (lacks, holds)))}; "
            "build the state with the components it was saved with"
        )


def _require_free(what: str, names: Collection[str], taken: tuple[str, ...]) -> None:
    for name in names:
        if name in taken or "/" in name or not name:
            raise StateError(
                f"{name!r} cannot name an {what}: names must not be empty, contain '/', "
                f"or be one of {', '.join(taken)}"
            )
