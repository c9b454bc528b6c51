"""Trying again: which errors, for how long, and what is said at the end. No storage is involved."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from seatrial.recovery.errors import DamagedCheckpointError
from seatrial.recovery.storage import retry
from seatrial.recovery.storage.retry import RetryPolicy, StillFailingError, is_transient, retried

QUICK = RetryPolicy(total_s=0.3, wait_first_s=0.001, wait_max_s=0.01)


def failing(*errors: Exception) -> tuple[Callable[[], str], list[int]]:
    """A call that raises these in turn, then succeeds; and a list that grows with each call."""
    calls: list[int] = []
    left = list(errors)

    def use() -> str:
        calls.append(1)
        if left:
            raise left.pop(0)
        return "done"

    return use, calls


@pytest.mark.parametrize("number", sorted(retry.TRANSIENT))
def test_what_is_transient_is_tried_again(number: int) -> None:
    use, calls = failing(*[OSError(number, "again")] * 3)
    assert retried(use, QUICK) == "done"
    assert len(calls) == 4


@pytest.mark.parametrize(
    "error",
    [
        *[
            OSError(number, "never")
            for number in (
                errno.ENOENT,
                errno.EACCES,
                errno.EPERM,
                errno.ENOSPC,
                errno.EDQUOT,
                errno.EROFS,
                errno.EINVAL,
                errno.ENODEV,
                errno.EEXIST,
                errno.EOPNOTSUPP,
            )
        ],
        DamagedCheckpointError("damage"),
        ValueError("mistake"),
        StillFailingError(errno.EIO, "tried before"),
    ],
    ids=repr,
)
def test_what_is_permanent_is_raised_at_once(error: Exception) -> None:
    use, calls = failing(error)
    with pytest.raises(type(error)) as caught:
        retried(use, QUICK)
    assert caught.value is error
    assert len(calls) == 1


def test_giving_up_says_how_often_and_how_long_and_keeps_the_errno() -> None:
    use, calls = failing(*[OSError(errno.ETIMEDOUT, "no answer", "/some/file")] * 100_000)
    with pytest.raises(StillFailingError, match=r"tried [0-9]+ times in 0\.[0-9] s") as caught:
        retried(use, QUICK)
    assert f"tried {len(calls)} times" in str(caught.value)
    assert len(calls) > 3
    assert (caught.value.errno, caught.value.filename) == (errno.ETIMEDOUT, "/some/file")
    assert not is_transient(caught.value)


def test_a_permanent_error_after_transient_ones_ends_the_tries() -> None:
    use, calls = failing(OSError(errno.EIO, "once"), OSError(errno.EACCES, "no"))
    with pytest.raises(PermissionError):
        retried(use, QUICK)
    assert len(calls) == 2


@pytest.mark.parametrize("error", [ConnectionError("broke"), TimeoutError("late")])
def test_an_error_of_a_library_without_errno_is_known_by_its_class(error: OSError) -> None:
    use, _ = failing(error)
    assert retried(use, QUICK) == "done"
