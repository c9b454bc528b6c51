"""An optimizer's state by parameter name: tensors in place, the rest as plain data.

Guarantees: state is keyed by the model's parameter names, never by position; tensors are the live
ones of ``optimizer.state``; what an optimizer creates lazily is created for a restore with the
layout of its parameter; a restored optimizer holds exactly the entries that were saved. Group
membership is checked by name. A rank may own a part of the state only: a pipeline stage's, or that
of a ``ZeroRedundancyOptimizer``.

Does not: call ``torch.distributed.checkpoint.state_dict`` (it runs a step with zero gradients to
create state, and collectives), or split one optimizer over several models. For
`seatrial.recovery.state` only.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from .checkpointable import TensorFacts
from .errors import StateError

# Parameters and their names are not hyperparameters; they are recorded by logical name instead.
_NOT_OPTIONS = frozenset({"params", "param_names"})


class OptimizerState:
    """View of one optimizer under the name prefix ``prefix`` (``optimizer/``).

    ``members`` are the parameters of every group over all ranks, where this rank has some of them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        prefix: str,
        members: Sequence[Sequence[str]] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.prefix = prefix
        self._all_members = None if members is None else [list(group) for group in members]
        # The optimizer that keeps the state and updates: of ZeRO the one inside, of this rank's.
        self._owner = _local_optimizer(optimizer)

    @property
    def rule(self) -> str:
        """The class that updates, whoever shares its state out."""
        return type(self._owner).__name__

    def tensors(self, names: Mapping[torch.Tensor, str]) -> dict[str, torch.Tensor]:
        """Live state tensors as ``<prefix><parameter>/<key>``."""
        return {
            f"{self.prefix}{name}/{key}": value
            for name, parameter in self._parameters(names)
            for key, value in self._state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }

    def objects(self, names: Mapping[torch.Tensor, str]) -> dict[str, object]:
        """Hyperparameters of every group, and state entries that are not tensors."""
        other: dict[str, dict[str, object]] = {}
        for name, parameter in self._parameters(names):
            entries = {
                key: copy.deepcopy(value)
                for key, value in self._state.get(parameter, {}).items()
                if not isinstance(value, torch.Tensor)
            }
            if entries:
                other[name] = entries
        if other and (self._all_members is not None or self._owner is not self.optimizer):
            raise StateError(
                f"{type(self._owner).__name__} keeps {', '.join(next(iter(other.values())))} of "
                f"{next(iter(other))} as a plain value, which every rank must know, but this rank "
                "updates only some parameters; use an optimizer whose state is tensors"
            )
        groups: list[object] = [
            {"parameters": members, "options": copy.deepcopy(_options(group))}
            for group, members in zip(
                self.optimizer.param_groups, self._members(names), strict=True
            )
        ]
        return {f"{self.prefix}param_groups": groups, f"{self.prefix}other_state": other}

    def prepare(self, stored: Mapping[str, TensorFacts], names: Mapping[torch.Tensor, str]) -> None:
        """Hold exactly the state tensors that ``stored`` names, creating and removing entries."""
        wanted: dict[torch.Tensor, dict[str, TensorFacts]] = {}
        for parameter, key, facts in self._destinations(stored, names).values():
            wanted.setdefault(parameter, {})[key] = facts
        for _, parameter in self._owned(names):
            stored_keys = wanted.get(parameter, {})
            # Through get, because optimizer.state creates an entry for whatever it is asked.
            live = self._state.get(parameter, {})
            for key in [k for k, v in live.items() if isinstance(v, torch.Tensor)]:
                if key not in stored_keys:
                    del live[key]
            for key, facts in stored_keys.items():
                if not isinstance(live.get(key), torch.Tensor):
                    self._state[parameter][key] = self._created(parameter, key, facts)
            if not self._state.get(parameter, True):
                del self._state[parameter]

    def scratch(
        self, stored: Mapping[str, TensorFacts], names: Mapping[torch.Tensor, str]
    ) -> dict[str, torch.Tensor]:
        """Destinations like those of `prepare` that are not part of the optimizer."""
        live = self.tensors(names)
        return {
            name: live[name].detach().clone()
            if name in live
            else self._created(parameter, key, facts)
            for name, (parameter, key, facts) in self._destinations(stored, names).items()
        }

    def check_groups(self, saved: object, names: Mapping[torch.Tensor, str]) -> None:
        """Raise `StateError` unless every saved group has the members of the live one."""
        if not isinstance(saved, list):
            raise StateError(f"the saved parameter groups are a {type(saved).__name__}, not a list")
        live = self._members(names)
        if len(saved) != len(live):
            raise StateError(
                f"the checkpoint's optimizer has {len(saved)} parameter groups and the one here "
                f"has {len(live)}; build the optimizer with the grouping it was saved with"
            )
        for index, (group, members) in enumerate(zip(saved, live, strict=True)):
            stored = set(group["parameters"])
            if stored != set(members):
                moved = ", ".join(sorted(stored ^ set(members))[:5])
                raise StateError(
                    f"parameter group {index} of the optimizer has other members than in the "
                    f"checkpoint: {moved} (first 5 of {len(stored ^ set(members))}); build the "
                    "optimizer with the grouping it was saved with"
                )

    def load_groups(self, saved: Sequence[Mapping[str, Mapping[str, object]]]) -> None:
        """Put hyperparameters back; a tensor hyperparameter (a capturable ``lr``) in place."""
        for group, stored in zip(self.optimizer.param_groups, saved, strict=True):
            for key in _options(group):
                if key not in stored["options"]:
                    del group[key]
            for key, value in stored["options"].items():
                live = group.get(key)
                if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
                    live.copy_(value)
                else:
                    group[key] = copy.deepcopy(value)

    def load_other_state(
        self, saved: Mapping[str, Mapping[str, object]], names: Mapping[torch.Tensor, str]
    ) -> None:
        """Put back state entries that are not tensors and remove those that were not saved."""
        for name, parameter in self._parameters(names):
            stored = saved.get(name, {})
            entries = self._state.get(parameter, {})
            for key in [k for k, v in entries.items() if not isinstance(v, torch.Tensor)]:
                if key not in stored:
                    del entries[key]
            for key, value in stored.items():
                self._state[parameter][key] = copy.deepcopy(value)

    @property
    def _state(self) -> MutableMapping[torch.Tensor, dict[str, Any]]:
        return self._owner.state

    def _parameters(self, names: Mapping[torch.Tensor, str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters of the optimizer."""
        return self._named(self.optimizer, names)

    def _owned(self, names: Mapping[torch.Tensor, str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Those whose state this rank keeps."""
        return self._named(self._owner, names)

    def _named(
        self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(parameter)
                if name is None:
                    raise StateError(
                        f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that "
                        "is not a parameter of the model, so it has no name; register it in the "
                        "model, and build the optimizer after the model has been wrapped or sharded"
                    )
                yield name, parameter

    def _members(self, names: Mapping[torch.Tensor, str]) -> list[list[str]]:
        flat = iter([name for name, _ in self._parameters(names)])
        own = [[next(flat) for _ in g["params"]] for g in self.optimizer.param_groups]
        if self._all_members is None:
            return own
        if len(own) != len(self._all_members) or any(
            set(some) - set(members) for some, members in zip(own, self._all_members, strict=True)
        ):
            raise StateError(
                "the optimizer's parameter groups are not part of those that were declared for "
                "all ranks; declare every parameter in the group that it is in"
            )
        return self._all_members

    def _destinations(
        self, stored: Mapping[str, TensorFacts], names: Mapping[torch.Tensor, str]
    ) -> dict[str, tuple[torch.Tensor, str, TensorFacts]]:
        """Parameter, key and facts of every stored tensor that belongs to a parameter here."""
        parameters = dict(self._owned(names))
        found: dict[str, tuple[torch.Tensor, str, TensorFacts]] = {}
        for full_name, facts in stored.items():
            parts = full_name.removeprefix(self.prefix).split("/")
            if not full_name.startswith(self.prefix):
                continue
            # Module names and state keys may contain a slash themselves.
            for cut in range(1, len(parts)):
                parameter = parameters.get("/".join(parts[:cut]))
                if parameter is not None:
                    found[full_name] = (parameter, "/".join(parts[cut:]), facts)
        return found

    def _created(self, parameter: torch.Tensor, key: str, facts: TensorFacts) -> torch.Tensor:
        if key != "step" and tuple(parameter.shape) == facts.shape:
            return torch.zeros_like(parameter, dtype=facts.dtype, requires_grad=False).detach()
        device = parameter.device
        if key == "step" and not self._step_on_device(parameter):
            # torch/optim/optimizer.py keeps ``step`` on the CPU unless a kernel reads it.
            device = torch.device("cpu")
        return torch.zeros(facts.shape, dtype=facts.dtype, device=device)

    def _step_on_device(self, parameter: torch.Tensor) -> bool:
        for group in self.optimizer.param_groups:
            if any(member is parameter for member in group["params"]):
                return bool(group.get("capturable") or group.get("fused"))
        return False


def _local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    # Only a process that uses it has imported it; the import is slow.
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer):
        inner: torch.optim.Optimizer = optimizer.optim
        return inner
    return optimizer


def _options(group: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
