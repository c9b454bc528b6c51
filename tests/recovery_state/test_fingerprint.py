"""Verifies which changes of a tensor a fingerprint sees, and that cutting it changes nothing.

Does not verify process groups: see tests/jobs for shards of several ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seatrial.recovery import fingerprint as module
from seatrial.recovery.errors import StateError
from seatrial.recovery.fingerprint import Fingerprinter
from seatrial.recovery.position_keys import Placement, _splitmix64, position_keys

DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def lanes(tensor: torch.Tensor, name: str = "model/w") -> tuple[int, int]:
    return Fingerprinter(rank=0).tensors({name: tensor})[name][:2]


def from_bits(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of ``dtype`` with the given bytes, uint8 of shape ``[n, itemsize]``."""
    return bits.contiguous().view(dtype).reshape(-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_bit_of_every_dtype_counts(dtype: torch.dtype) -> None:
    size = dtype.itemsize
    bits = torch.randint(0, 256, (3, size), dtype=torch.uint8)
    if dtype is torch.bool:
        bits &= 1
    seen = {lanes(from_bits(bits, dtype))}
    flips = 1 if dtype is torch.bool else 8
    for element in range(3):
        for byte in range(size):
            for bit in range(flips):
                flipped = bits.clone()
                flipped[element, byte] ^= 1 << bit
                seen.add(lanes(from_bits(flipped, dtype)))
    assert len(seen) == 1 + 3 * size * flips
    first, second = zip(*seen, strict=True)
    assert len(set(first)) == len(set(second)) == len(seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_signs_flipped_in_pairs_do_not_cancel(dtype: torch.dtype) -> None:
    values = torch.arange(1, 65).to(dtype)
    seen = {lanes(values)}
    for index in range(63):
        flipped = values.clone()
        flipped[index : index + 2] *= -1
        seen.add(lanes(flipped))
    assert len(seen) == 64


def test_negative_zero_and_nan_payloads_count() -> None:
    words = [0, -(2**31), 0x7FC00000, 0x7FC00001]
    tensors = [torch.tensor([word], dtype=torch.int32).view(torch.float32) for word in words]
    assert len({lanes(tensor) for tensor in tensors}) == 4


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=8), st.data())
def test_a_permutation_counts_unless_it_changes_nothing(
    values: list[int], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(values))
    same = lanes(torch.tensor(values)) == lanes(torch.tensor(shuffled))
    assert same == (values == shuffled)


def test_two_tensors_that_trade_names_count() -> None:
    a, b = torch.randn(4), torch.randn(4)
    one = Fingerprinter(rank=0).tensors({"model/a": a, "model/b": b})
    other = Fingerprinter(rank=0).tensors({"model/a": b, "model/b": a})
    assert one["model/a"] != other["model/a"]
    assert one["model/b"] != other["model/b"]


def test_name_shape_and_dtype_count_for_equal_bits() -> None:
    zeros = torch.zeros(6)
    variants = {
        lanes(zeros),
        lanes(zeros, "model/v"),
        lanes(zeros.reshape(2, 3)),
        lanes(zeros.to(torch.int32)),
        lanes(zeros[:5]),
    }
    assert len(variants) == 5


def test_memory_layout_does_not_count() -> None:
    matrix = torch.randn(5, 7)
    assert lanes(matrix.t().contiguous().t()) == lanes(matrix)
    assert lanes(torch.randn(10, 14)[::2, ::2].copy_(matrix)) == lanes(matrix)
    complex_values = torch.randn(4, dtype=torch.complex64)
    assert lanes(complex_values.conj()) == lanes(complex_values.conj().resolve_conj())


def test_scalars_and_empty_tensors_have_fingerprints() -> None:
    found = Fingerprinter(rank=3).tensors(
        {"a/scalar": torch.tensor(2.0), "a/none": torch.empty(0, 4)}
    )
    assert found["a/scalar"][2:] == (1, 1, "rank3")
    assert found["a/none"] == (0, 0, 0, 0, "rank3")
    assert lanes(torch.tensor(2.0)) != lanes(torch.tensor(3.0))


def test_a_tensor_among_others_has_the_fingerprint_it_has_alone() -> None:
    tensors = {f"model/{dtype}": torch.ones(5).to(dtype) for dtype in DTYPES}
    together = Fingerprinter(rank=0).tensors(tensors)
    assert list(together) == list(tensors)
    assert {name: part[:2] for name, part in together.items()} == {
        name: lanes(tensor, name) for name, tensor in tensors.items()
    }


def test_kept_keys_follow_a_change_of_shape() -> None:
    fingerprinter = Fingerprinter(rank=0)
    fingerprinter.tensors({"model/w": torch.ones(4)})
    assert fingerprinter.tensors({"model/w": torch.ones(5)})["model/w"][:2] == lanes(torch.ones(5))


@pytest.mark.parametrize("shape", [(50,), (7, 9), (1, 60), (3, 4, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_large_tensors_have_the_same_fingerprint_piecewise(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.randn(shape).to(dtype)
    whole = lanes(tensor)
    monkeypatch.setattr(module, "_LARGE_WORDS", 16)
    assert lanes(tensor) == whole


def test_keys_of_a_shard_are_those_of_the_whole() -> None:
    facts: Any = {
        "name": "model/w",
        "dtype": torch.float32,
        "global_shape": (6, 5),
        "replica": "mesh0-1",
    }
    device = torch.device("cpu")
    whole = position_keys(Placement(shape=(6, 5), offset=(0, 0), **facts), words=1, device=device)
    part = position_keys(Placement(shape=(2, 3), offset=(3, 1), **facts), words=1, device=device)
    assert torch.equal(part.view(2, 2, 3), whole.view(2, 6, 5)[:, 3:5, 1:4])
    assert bool((whole % 2 != 0).all())


def test_keys_come_from_splitmix64() -> None:
    # The outputs for seed 1234567 that https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64
    # gives for checking an implementation.
    known = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    found = _splitmix64(torch.arange(5), seed=1234567)
    assert [value % 2**64 for value in found.tolist()] == known


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(StateError, match="sparse_coo tensor"):
        lanes(torch.eye(3).to_sparse())
