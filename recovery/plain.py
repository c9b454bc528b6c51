"""Plain data as JSON and back, exactly.

Guarantees: `loads(dumps(x))` equals ``x`` bit for bit, type for type and in the same order, for
None, bool, int of any size, float (NaN payloads, infinities, -0.0), str (lone surrogates too),
bytes, BytesIO (its position is 0), list, tuple, set, frozenset, dict and OrderedDict with any
encodable keys, and, nested in them, NumPy scalars and arrays and torch tensors. Decoding never
executes code and imports nothing but NumPy or torch, and those only when such a value is met.

Does not: keep identity (a list that is held twice comes back as two lists), subclasses (refused),
the device, memory layout or ``requires_grad`` of a tensor (it comes back on the CPU, contiguous).
It is meant for small values; large tensors belong in a shard file.

Anyone may call it; this module imports neither NumPy nor torch.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import re
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from .errors import ManifestError, StateError

if TYPE_CHECKING:
    import numpy
    import torch

__all__ = ["decode", "dumps", "encode", "loads"]

_Kind = TypeVar("_Kind")

TAG = "$"
"""The key that marks a JSON object as an encoded value instead of a dictionary."""

_INT_LIMIT = 1 << 63
_NUMPY_DTYPE = re.compile(r"[<>|=]([biufcSU][0-9]{1,9}|[mM]8(\[[0-9]{0,9}[A-Za-z]{1,7}\])?)")
_TORCH_DTYPE = re.compile(
    r"bool|u?int(8|16|32|64)|bfloat16|float(16|32|64)|complex(32|64|128)"
    r"|float8_e4m3fn|float8_e4m3fnuz|float8_e5m2|float8_e5m2fnuz|float8_e8m0fnu|float4_e2m1fn_x2"
)


def dumps(value: object, *, name: str = "value", arrays: bool = True) -> bytes:
    """``value`` as UTF-8 JSON. With ``arrays=False``, NumPy and torch values are refused.

    Raises:
        StateError: something in ``value`` is not plain data; the message gives the path to it,
            starting with ``name``, and its type.
    """
    try:
        encoded = encode(value, name=name, arrays=arrays)
        return json.dumps(encoded, separators=(",", ":"), allow_nan=False).encode()
    except RecursionError:
        raise StateError(
            f"{name} is nested too deeply to be stored, or contains itself; flatten it"
        ) from None


def loads(data: bytes, *, arrays: bool = True) -> object:
    """The value that `dumps` encoded.

    Raises:
        ManifestError: the bytes are not JSON, or not what `dumps` writes.
    """
    try:
        return decode(json.loads(data, parse_constant=_no_constant), arrays=arrays)
    except RecursionError:
        raise ManifestError("stored plain data is nested too deeply to be read") from None
    except ValueError as error:
        raise ManifestError(f"stored plain data is not JSON: {error}") from error


def _no_constant(text: str) -> NoReturn:
    raise ManifestError(f"stored plain data holds {text}, which is not JSON")


def encode(value: object, *, name: str = "value", arrays: bool = True) -> object:
    """``value`` as data that `json` can write; see `dumps` for what is raised."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if isinstance(value, int) and kind is int:
        # Python refuses to print very long integers in decimal, and never in hexadecimal.
        return value if -_INT_LIMIT <= value < _INT_LIMIT else _tagged("int", hex(value))
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else _tagged("float", struct.pack("<d", value).hex())
    if isinstance(value, str) and kind is str:
        return value if _is_text(value) else _tagged("str", _base64(_surrogates(value)))
    if isinstance(value, bytes) and kind is bytes:
        return _tagged("bytes", _base64(value))
    if isinstance(value, io.BytesIO) and kind is io.BytesIO:
        return _tagged("BytesIO", _base64(value.getvalue()))
    if isinstance(value, (list, tuple)) and kind in (list, tuple):
        items = [
            encode(item, name=f"{name}[{index}]", arrays=arrays) for index, item in enumerate(value)
        ]
        return items if kind is list else _tagged("tuple", items)
    if isinstance(value, (set, frozenset)) and kind in (set, frozenset):
        members = [encode(item, name=f"{name}{{{item!r}}}", arrays=arrays) for item in value]
        # Sorted, so that equal sets have equal bytes in every process.
        return _tagged(kind.__name__, sorted(members, key=json.dumps))
    if isinstance(value, dict) and kind in (dict, OrderedDict):
        return _encode_dict(value, name, arrays)
    if arrays:
        encoded = _encode_array(value)
        if encoded is not None:
            return encoded
    raise StateError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot store; "
        "store plain data instead: None, bool, int, float, str, bytes, BytesIO, list, tuple, set, "
        + ("dict, NumPy arrays and torch tensors" if arrays else "dict (no arrays or tensors here)")
    )


def _encode_dict(value: dict[object, object], name: str, arrays: bool) -> object:
    simple = type(value) is dict and all(
        type(key) is str and key != TAG and _is_text(key) for key in value
    )
    if simple:
        return {
            str(key): encode(item, name=f"{name}[{key!r}]", arrays=arrays)
            for key, item in value.items()
        }
    pairs = [
        [
            encode(key, name=f"key {key!r} of {name}", arrays=arrays),
            encode(item, name=f"{name}[{key!r}]", arrays=arrays),
        ]
        for key, item in value.items()
    ]
    return _tagged("dict" if type(value) is dict else "OrderedDict", pairs)


def _encode_array(value: Any) -> object | None:
    # A value of a library that was never imported cannot exist, so nothing is imported here.
    np: Any = sys.modules.get("numpy")
    if np is not None and (type(value) is np.ndarray or isinstance(value, np.generic)):
        scalar = isinstance(value, np.generic)
        array = np.asarray(value)
        if not _NUMPY_DTYPE.fullmatch(array.dtype.str):
            return None
        encoded = _tagged("numpy.scalar" if scalar else "numpy.array", _base64(array.tobytes()))
        return encoded | {"dtype": array.dtype.str, "shape": list(array.shape)}
    th: Any = sys.modules.get("torch")
    if th is not None and type(value) is th.Tensor:
        dtype = str(value.dtype).removeprefix("torch.")
        if not _TORCH_DTYPE.fullmatch(dtype) or value.layout is not th.strided:
            return None
        raw = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        encoded = _tagged("torch.tensor", _base64(raw.view(th.uint8).numpy().tobytes()))
        return encoded | {"dtype": dtype, "shape": list(value.shape)}
    return None


def decode(encoded: object, *, arrays: bool = True) -> object:
    """The value that `encode` encoded; raises `ManifestError` on anything else."""
    if isinstance(encoded, list):
        return [decode(item, arrays=arrays) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if TAG not in encoded:
        return {key: decode(item, arrays=arrays) for key, item in encoded.items()}
    tag, body = encoded[TAG], encoded.get("value")
    try:
        if tag in _TEXT:
            return _TEXT[tag](_of(str, body))
        if tag in _SEQUENCES:
            return _SEQUENCES[tag]([decode(item, arrays=arrays) for item in _of(list, body)])
        if tag in ("dict", "OrderedDict"):
            return _decode_pairs(tag, _of(list, body), arrays)
        if arrays and tag in ("numpy.array", "numpy.scalar", "torch.tensor"):
            shape = [_of(int, size) for size in _of(list, encoded.get("shape"))]
            dtype, raw = _of(str, encoded.get("dtype")), _bytes(_of(str, body))
            if tag == "torch.tensor":
                return _decode_tensor(dtype, shape, raw)
            return _decode_numpy(dtype, shape, raw, scalar=tag == "numpy.scalar")
    except (ValueError, TypeError, OverflowError, RuntimeError, struct.error) as error:
        raise ManifestError(f"a stored value tagged {tag!r} is malformed: {error}") from error
    raise ManifestError(f"a stored value is tagged {tag!r}, which this version does not know")


def _decode_pairs(tag: str, pairs: list[object], arrays: bool) -> dict[object, object]:
    result: dict[object, object] = {} if tag == "dict" else OrderedDict()
    for pair in pairs:
        key, item = _of(list, pair)
        result[decode(key, arrays=arrays)] = decode(item, arrays=arrays)
    return result


def _decode_numpy(
    dtype: str, shape: list[int], raw: bytes, *, scalar: bool
) -> numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.generic]] | numpy.generic:
    if not _NUMPY_DTYPE.fullmatch(dtype):
        raise ValueError(f"{dtype!r} is no dtype of plain data")
    import numpy as np

    _check_size(len(raw), shape, np.dtype(dtype).itemsize)
    array = np.ndarray(shape, dtype=dtype, buffer=bytearray(raw) or None)
    return array[()] if scalar else array


def _decode_tensor(dtype: str, shape: list[int], raw: bytes) -> torch.Tensor:
    if not _TORCH_DTYPE.fullmatch(dtype):
        raise ValueError(f"{dtype!r} is no dtype of plain data")
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    _check_size(len(raw), shape, kind.itemsize)
    # frombuffer refuses an empty buffer.
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0).byte()
    return flat.view(kind).reshape(shape)


def _check_size(length_bytes: int, shape: list[int], itemsize: int) -> None:
    if any(size < 0 for size in shape) or math.prod(shape) * itemsize != length_bytes:
        raise ValueError(f"{length_bytes} bytes do not fill shape {shape} of {itemsize}-byte items")


def _of(kind: type[_Kind], value: object) -> _Kind:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{kind.__name__} expected, found {type(value).__name__}")
    return value


def _tagged(tag: str, body: object) -> dict[str, object]:
    return {TAG: tag, "value": body}


def _is_text(value: str) -> bool:
    # A pair of lone surrogates would come back from JSON as the one character they encode.
    return value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)


def _surrogates(value: str) -> bytes:
    return value.encode("utf-8", "surrogatepass")


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from None


_TEXT: dict[str, Callable[[str], object]] = {
    "int": lambda text: int(text, 16),
    "float": lambda text: struct.unpack("<d", bytes.fromhex(text))[0],
    "str": lambda text: _bytes(text).decode("utf-8", "surrogatepass"),
    "bytes": _bytes,
    "BytesIO": lambda text: io.BytesIO(_bytes(text)),
}
_SEQUENCES: dict[str, Callable[[list[object]], object]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
