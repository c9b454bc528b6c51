"""The rolling fingerprint of a rank's calls, and what the sum over the ranks makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from seatrial.recovery.collectives.callsite import CallSite
from seatrial.recovery.collectives.consistency import Consistency
from seatrial.recovery.collectives.journal import UINT64, Signature, Stream


def signature(operation: str = "all_reduce", line: int = 1, message: bool = False) -> Signature:
    site = CallSite("a.py", line, "f")
    return Signature(
        index=0,
        operation=operation,
        shapes="4",
        dtypes="float32",
        extra="SUM",
        site=site,
        size_bytes=16,
        is_message=message,
    )


def stream(*signatures: Signature) -> Stream:
    made = Stream()
    for each in signatures:
        add(made, each)
    return made


def add(stream: Stream, signature: Signature) -> None:
    stream.recent.append(signature)
    stream.count += 1


A, B = signature(line=1), signature(line=2)


def test_no_calls_have_no_fingerprint() -> None:
    assert stream().fingerprint() == 0


def test_the_order_counts() -> None:
    assert stream(A, B).fingerprint() != stream(B, A).fingerprint()


def test_the_number_counts() -> None:
    assert len({stream(*[A] * count).fingerprint() for count in range(5)}) == 5


def test_a_place_that_stands_for_another_is_the_same() -> None:
    other = signature(line=9)
    assert other.code != A.code
    other.stands_for(str(A.site))
    assert other.code == A.code


def test_after_an_agreement_only_later_calls_count() -> None:
    made = stream(A, B)
    made.agreed(2)
    add(made, B)
    assert made.fingerprint() == stream(B).fingerprint()
    assert made.count == 3


def test_calls_that_are_folded_still_count() -> None:
    whole, folded = stream(*[A, B] * 5), Stream()
    for _ in range(5):
        add(folded, A)
        folded.fold()
        assert not folded.recent
        add(folded, B)
    assert (folded.count, folded.folded) == (10, 9)
    assert folded.fingerprint() == whole.fingerprint()


def lanes(streams: Sequence[Stream], pairs: Sequence[dict[tuple[int, int], Stream]] = ()) -> Any:
    """The sums over ranks of what each would add to a check."""
    ranks = tuple(range(len(streams)))
    total = [0, 0]
    for rank, own in enumerate(streams):
        group = SimpleNamespace(
            index=0,
            ranks=ranks,
            group_name="g",
            collectives=own,
            pairs=pairs[rank] if pairs else {},
            rank=lambda rank=rank: rank,
        )
        one = Consistency.__new__(Consistency)
        one._observer = SimpleNamespace(groups=[group])  # type: ignore[assignment]
        one._factors = {}
        total = [(a + b) & UINT64 for a, b in zip(total, one._fingerprints(), strict=True)]
    return total


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_sum_over_ranks_that_agree_is_zero(ranks: int) -> None:
    assert lanes([stream(A, B, A) for _ in range(ranks)]) == [0, 0]


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_one_rank_that_differs_leaves_a_rest(odd: int) -> None:
    streams = [stream(B, A) if rank == odd else stream(A, B) for rank in range(3)]
    assert 0 not in lanes(streams)


def test_one_rank_that_did_nothing_leaves_a_rest() -> None:
    assert 0 not in lanes([stream(A), stream()])


def test_messages_cancel_with_those_received() -> None:
    sent = stream(signature("send", 3, message=True))
    received = stream(signature("recv", 4, message=True))
    assert lanes([stream(), stream()], [{(0, 1): sent}, {(0, 1): received}]) == [0, 0]
    odd: list[dict[tuple[int, int], Stream]] = [{(0, 1): sent}, {(0, 1): stream(B)}]
    assert 0 not in lanes([stream(), stream()], odd)
