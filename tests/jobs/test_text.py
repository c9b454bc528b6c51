"""Verifies which bytes a window holds, and that an unusable text is a sentence, not a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from seatrial.plugins.jobs.text import ByteWindows, TextError, load_text


def test_the_default_text_is_at_hand_and_always_the_same() -> None:
    text = load_text()
    assert len(text) > 100_000
    assert text == load_text("")


def test_windows_spread_from_the_first_byte_to_the_last() -> None:
    text = bytes(range(100))
    windows = ByteWindows(text, context=4, num_samples=20)
    batch = windows.batch(torch.tensor([0, 19]))
    assert batch.dtype == torch.int64
    assert batch.tolist() == [[0, 1, 2, 3, 4], [95, 96, 97, 98, 99]]
    starts = windows.batch(torch.arange(20))[:, 0]
    assert starts.tolist() == [index * 95 // 19 for index in range(20)]


def test_a_text_of_one_window_repeats_it() -> None:
    windows = ByteWindows(b"abc", context=2, num_samples=3)
    assert windows.batch(torch.arange(3)).tolist() == [[97, 98, 99]] * 3


def test_a_batch_without_indices_is_empty() -> None:
    windows = ByteWindows(b"abcdef", context=2, num_samples=1)
    assert windows.batch(torch.arange(0)).shape == (0, 3)
    assert len(windows) == 1


def test_a_file_is_read_as_bytes(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\xff\x00a")
    assert load_text(path) == b"\xff\x00a"


def test_a_text_that_is_too_short_says_how_long_it_must_be() -> None:
    with pytest.raises(TextError, match="has 4 bytes, and one window of context=4 needs 5"):
        ByteWindows(b"abcd", context=4, num_samples=2)


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"nothing cannot be read: No such file"):
        load_text(tmp_path / "nothing")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    with pytest.raises(TextError, match="empty is empty"):
        load_text(path)
