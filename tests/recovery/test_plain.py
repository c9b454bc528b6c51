"""Plain data comes back exactly, and what is not plain data is refused by name."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seatrial.recovery import plain
from seatrial.recovery.errors import ManifestError, StateError

_hashable = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()))
    | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=8,
)
_values = st.recursive(
    _hashable,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(_hashable, inner, max_size=4)
        | st.dictionaries(_hashable, inner, max_size=3).map(OrderedDict)
        | st.sets(_hashable, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=20,
)


def identical(one: Any, other: Any) -> bool:
    """Equality down to types, orders, signs of zero and bits of NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(identical, one, other))
    if isinstance(one, dict):
        return identical(list(one.items()), list(other.items()))
    if isinstance(one, (set, frozenset)):
        key = plain.dumps
        return identical(sorted(one, key=key), sorted(other, key=key))
    return bool(one == other)


@given(_values)
def test_whatever_is_plain_comes_back_identical(value: object) -> None:
    assert identical(plain.loads(plain.dumps(value)), value)


def test_integers_of_any_size_come_back() -> None:
    value = [1 << 63, -(1 << 63) - 1, 1 << 100_000]
    assert plain.loads(plain.dumps(value)) == value


def test_the_bits_of_a_nan_come_back() -> None:
    bits = bytes.fromhex("0100000000adf87f")
    back = plain.loads(plain.dumps(struct.unpack("<d", bits)[0]))
    assert struct.pack("<d", back) == bits


def test_two_lone_surrogates_do_not_become_one_character() -> None:
    text = "\ud800\udc00"
    assert plain.loads(plain.dumps({text: text})) == {text: text}


def test_a_dictionary_that_uses_the_tag_as_a_key_comes_back() -> None:
    value = {"$": "int", "value": "0x10"}
    assert plain.loads(plain.dumps(value)) == value


@pytest.mark.parametrize(
    "dtype", ["<f4", ">f8", "|b1", "<c16", "<U3", "|S5", "<M8[ns]", "<m8[s]", "<f2", "|u1"]
)
@pytest.mark.parametrize("shape", [(), (0, 2), (2, 3)])
def test_numpy_arrays_come_back(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, dtype)
    array[...] = (np.arange(array.size) % 2).reshape(shape)
    back = plain.loads(plain.dumps(array))
    assert type(back) is np.ndarray
    assert back.dtype.str == dtype
    assert back.shape == shape
    assert back.tobytes() == array.tobytes()
    back.flags.writeable = True


@pytest.mark.parametrize("scalar", [np.float64(0.1), np.int8(-3), np.bool_(True), np.str_("å")])
def test_numpy_scalars_stay_numpy_scalars(scalar: np.generic) -> None:
    back = plain.loads(plain.dumps(scalar))
    assert type(back) is type(scalar)
    assert back == scalar


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.uint64,
        torch.int64,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.complex32,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size = math.prod(shape) * dtype.itemsize
    raw = torch.arange(size, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    tensor = raw.view(dtype).reshape(shape)
    back = plain.loads(plain.dumps([tensor]))[0]  # type: ignore[index]
    assert back.dtype is dtype
    assert back.shape == shape
    assert torch.equal(back.reshape(-1).view(torch.uint8), raw)


def test_a_view_that_is_conjugated_and_turned_comes_back_as_its_values() -> None:
    tensor = torch.tensor([[1 + 2j, 3 - 1j]]).t().conj()
    assert torch.equal(plain.loads(plain.dumps(tensor)), tensor)  # type: ignore[arg-type]


class _Float(float):
    pass


@pytest.mark.parametrize(
    ("value", "path", "kind"),
    [
        ({"a": [1, {"b": object()}]}, "state['a'][1]['b']", "builtins.object"),
        ([_Float(1)], "state[0]", "_Float"),
        ({("k", 1j): 0}, "key ('k', 1j) of state[1]", "builtins.complex"),
        ({"p": torch.nn.Parameter(torch.ones(1))}, "state['p']", "Parameter"),
        ([np.array([object()])], "state[0]", "numpy.ndarray"),
        ([torch.ones(2).to_sparse()], "state[0]", "torch.Tensor"),
    ],
)
def test_what_is_not_plain_is_refused_with_its_path_and_type(
    value: object, path: str, kind: str
) -> None:
    with pytest.raises(StateError) as caught:
        plain.dumps(value, name="state")
    assert path in str(caught.value)
    assert kind in str(caught.value)


def test_a_list_that_contains_itself_is_refused() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(StateError, match="contains itself"):
        plain.dumps(value)


def test_arrays_are_refused_where_they_are_not_allowed() -> None:
    with pytest.raises(StateError, match="no arrays or tensors here"):
        plain.dumps([np.ones(1)], arrays=False)
    with pytest.raises(ManifestError):
        plain.loads(plain.dumps([np.ones(1)]), arrays=False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "NaN",
        '{"$":"eval","value":"1"}',
        '{"$":"int","value":"zz"}',
        '{"$":"int","value":3}',
        '{"$":["int"],"value":"1"}',
        '{"$":"float","value":"00"}',
        '{"$":"bytes","value":"*"}',
        '{"$":"tuple"}',
        '{"$":"set","value":[[]]}',
        '{"$":"dict","value":[[1]]}',
        '{"$":"dict","value":[[[],1]]}',
        '{"$":"numpy.array","value":"","dtype":"|O","shape":[0]}',
        '{"$":"numpy.array","value":"","dtype":"<f4","shape":[1]}',
        '{"$":"numpy.array","value":"","dtype":"<f3","shape":[0]}',
        '{"$":"torch.tensor","value":"","dtype":"float32","shape":[-1]}',
        '{"$":"torch.tensor","value":"","dtype":"load","shape":[0]}',
        '{"$":"torch.tensor","value":"AAA=","dtype":"float32","shape":[]}',
        "[" * 100_000,
    ],
)
def test_malformed_bytes_are_refused(text: str) -> None:
    with pytest.raises(ManifestError):
        plain.loads(text.encode())


def test_modules_for_a_supervisor_import_neither_torch_nor_numpy() -> None:
    program = (
        "import sys, seatrial.recovery, seatrial.recovery.inspect, seatrial.recovery.manifest,"
        "seatrial.recovery.publish, seatrial.recovery.errors, seatrial.recovery.probe,"
        "seatrial.recovery.exchange, seatrial.recovery.retention;"
        "from seatrial.recovery import inspect_store, Manifest;"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
