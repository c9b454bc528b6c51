"""A job's options: a frozen dataclass filled from ``key=value`` strings.

Guarantees: an unknown key or a value that does not fit the field's type is a `UsageError` that
names the job, the value and what is valid. For jobs whose options are bool, int, float or str.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

from seatrial.chaos.errors import UsageError

Config = TypeVar("Config")

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def parse_options(config: type[Config], options: Mapping[str, object], *, job: str) -> Config:
    """``config(**options)`` with strings converted to the type of their field.

    Raises:
        UsageError: an unknown option, or a value of the wrong type.
    """
    types = get_type_hints(config)
    valid = [field.name for field in fields(config)]  # type: ignore[arg-type]
    unknown = [name for name in options if name not in valid]
    if unknown:
        raise UsageError(
            f"the job {job} has no option {', '.join(map(repr, unknown))}; "
            f"its options are {', '.join(valid)}"
        )
    return config(
        **{name: _convert(job, name, value, types[name]) for name, value in options.items()}
    )


def _convert(job: str, name: str, value: object, kind: type[Any]) -> object:
    if type(value) is kind:
        return value
    if kind is float and type(value) is int:
        return float(value)
    try:
        if not isinstance(value, str):
            raise TypeError
        if kind is not bool:
            return kind(value)
        lowered = value.lower()
        if lowered not in _TRUE + _FALSE:
            raise ValueError
    except (TypeError, ValueError):
        valid = "true or false" if kind is bool else f"of type {kind.__name__}"
        raise UsageError(f"the option {name}={value!r} of the job {job} must be {valid}") from None
    return lowered in _TRUE
