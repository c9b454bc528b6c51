"""Adding up what ranks fingerprinted, and finding the first state that differs.

Guarantees: nothing compares equal by being absent. A rank's part that is missing, two parts that
overlap, two different sizes of one tensor, or nothing at all to compare are errors; copies of a
tensor that should be equal on several ranks and are not have a value of their own, which equals
only the same disagreement.

Does not: know tolerances (equality is bitwise), or import torch: a report may be made anywhere.

Anyone may call it; the parts are `seatrial.recovery.fingerprint.Fingerprint.to_json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .errors import StateError

Combined = dict[str, dict[str, str]]
"""Component -> name -> value; equal values mean equal bits."""

Holders = Mapping[str, tuple[int, ...]]
"""Tensor name -> the ranks that hold some of it."""

CAUSES_FIRST = ("progress", "sampler", "rng", "scheduler", "scaler")
"""Components that others depend on. Extras follow, then the effects."""

EFFECTS_LAST = ("optimizer", "model")
"""A wrong moment or learning rate shows in the model one step later, seldom the other way."""

_DISAGREEMENT = "copies differ: "

Kind = Literal["value", "missing", "unexpected", "copies", "uneven"]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One piece of state that is not the same.

    ``kind`` is ``value`` (other bits), ``missing`` (only the reference has it), ``unexpected`` (the
    reference does not have it), ``copies`` (the ranks that should hold equal copies do not) or
    ``uneven`` (those of the reference do not).
    """

    component: str
    name: str
    kind: Kind

    def __str__(self) -> str:
        said = {
            "value": "differs",
            "missing": "is missing",
            "unexpected": "is not in the reference",
            "copies": "is not the same on all ranks",
            "uneven": "is not the same on all ranks of the reference, and here it is",
        }
        return f"{self.name} {said[self.kind]}"


def combine(parts: Sequence[Mapping[str, Any]], *, world_size: int | None = None) -> Combined:
    """Add one fingerprint of every rank up to that of the whole state.

    Tensors and shared objects have the same names and values on every topology. Objects of one rank
    are named ``rng/torch@rank0``. Without ``world_size`` a missing last rank goes unnoticed where
    no tensor is sharded.

    Raises:
        StateError: not exactly one part of every rank, or a tensor of which a piece is missing.
    """
    ranks = sorted(part["rank"] for part in parts)
    expected = list(range(len(parts) if world_size is None else world_size))
    if not parts or ranks != expected:
        raise StateError(
            f"a fingerprint needs exactly one part of every rank, got parts of ranks {ranks}"
        )
    combined: Combined = {}
    for name, copies in _by_name(parts, "shared").items():
        _put(combined, name, _agreed(copies))
    for part in sorted(parts, key=lambda part: part["rank"]):
        for name, digest in part["own"].items():
            _put(combined, f"{name}@rank{part['rank']}", digest)
    tensors: dict[str, list[Sequence[Any]]] = {}
    for part in parts:
        for name, shard in part["tensors"].items():
            tensors.setdefault(name, []).append(shard)
    for name, shards in tensors.items():
        _put(combined, name, _agreed(_replicas(name, shards)))
    if not combined:
        raise StateError("the fingerprint of a state without tensors and objects proves nothing")
    return combined


def holders(parts: Sequence[Mapping[str, Any]]) -> Holders:
    """Which ranks hold each tensor, in whole or in part; comparable on one topology only."""
    found: dict[str, tuple[int, ...]] = {}
    for part in sorted(parts, key=lambda part: part["rank"]):
        for name in part["tensors"]:
            found[name] = (*found.get(name, ()), part["rank"])
    return found


def first_misplaced(reference: Holders, other: Holders) -> Difference | None:
    """A tensor that some rank lacks, or has beyond the reference; values are not looked at.

    The sum of a state's parts cannot show a whole copy that is absent on one rank.
    """
    for name, expected in reference.items():
        found = other.get(name, ())
        if found != expected:
            kind: Literal["missing", "unexpected"]
            kind = "missing" if set(expected) - set(found) else "unexpected"
            ranks = ", ".join(str(rank) for rank in sorted(set(expected) ^ set(found)))
            component = name.partition("/")[0]
            return Difference(component=component, name=f"{name} on rank {ranks}", kind=kind)
    return None


def disagreements(combined: Combined) -> list[tuple[str, str]]:
    """Component and name of everything whose copies differ between ranks."""
    return [
        (component, name)
        for component in ordered(combined)
        for name, value in combined[component].items()
        if value.startswith(_DISAGREEMENT)
    ]


def first_difference(reference: Combined, other: Combined) -> Difference | None:
    """The difference nearest to the cause, or ``None`` if the states are bitwise equal.

    Raises:
        StateError: one of the two is empty; emptiness is not equality.
    """
    return next(differences(reference, other), None)


def differences(reference: Combined, other: Combined) -> Iterator[Difference]:
    """All differences, causes before effects: components as `ordered`, names as the reference."""
    for what, combined in (("reference", reference), ("state", other)):
        if not any(combined.values()):
            raise StateError(f"the {what} to compare is empty; emptiness is not equality")
    for component in ordered(reference | other):
        expected, found = reference.get(component, {}), other.get(component, {})
        for name in [*expected, *(name for name in found if name not in expected)]:
            if expected.get(name) != found.get(name):
                kind = _kind(expected.get(name), found.get(name))
                yield Difference(component=component, name=name, kind=kind)


def ordered(components: Mapping[str, object]) -> list[str]:
    """Component names, causes before effects; unknown ones in between, in their own order."""
    first = [name for name in CAUSES_FIRST if name in components]
    last = [name for name in EFFECTS_LAST if name in components]
    return [*first, *(name for name in components if name not in (*first, *last)), *last]


def _kind(expected: str | None, found: str | None) -> Kind:
    if found is None:
        return "missing"
    if expected is None:
        return "unexpected"
    if found.startswith(_DISAGREEMENT):
        return "copies"
    return "uneven" if expected.startswith(_DISAGREEMENT) else "value"


def _by_name(parts: Sequence[Mapping[str, Any]], key: str) -> dict[str, dict[str, str]]:
    """Name -> holder -> value; a rank without an object that others share counts as ``absent``."""
    names = {name: None for part in parts for name in part[key]}
    return {
        name: {f"rank{part['rank']}": part[key].get(name, "absent") for part in parts}
        for name in names
    }


def _replicas(name: str, shards: Sequence[Sequence[Any]]) -> dict[str, str]:
    """The value of every replica of a tensor, from its shards."""
    sums: dict[str, tuple[int, int, int]] = {}
    for first, second, count, _, replica in shards:
        a, b, counted = sums.get(replica, (0, 0, 0))
        sums[replica] = ((a + first) % 2**64, (b + second) % 2**64, counted + count)
    sizes = {numel for _, _, _, numel, _ in shards}
    if len(sizes) > 1:
        raise StateError(f"ranks disagree on how many elements {name} has: {sorted(sizes)}")
    numel = sizes.pop()
    for replica, (_, _, counted) in sums.items():
        if counted != numel:
            raise StateError(
                f"the fingerprint of {name} covers {counted} of its {numel} elements in the copy "
                f"{replica}; a rank's part is missing or counted twice"
            )
    return {replica: f"{a:016x}{b:016x}" for replica, (a, b, _) in sums.items()}


def _agreed(copies: Mapping[str, str]) -> str:
    values = set(copies.values())
    if len(values) == 1:
        return values.pop()
    return _DISAGREEMENT + " ".join(f"{holder}={copies[holder]}" for holder in sorted(copies))


def _put(combined: Combined, name: str, value: str) -> None:
    combined.setdefault(name.partition("/")[0], {})[name] = value
