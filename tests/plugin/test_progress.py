"""On a terminal a line shows the step of the running trial, and nothing of it stays.

Verifies what a real pseudo-terminal receives. Does not verify how often the line is redrawn.
"""

from __future__ import annotations

import re

import pexpect
import pytest

COMMAND = ["-p", "no:cacheprovider", "--color=no", "--chaos", "--chaos-fault=clean"]


@pytest.fixture
def screen(pytester: pytest.Pytester) -> str:
    """Everything that a terminal gets to see of one trial of the bundled job."""
    child = pytester.spawn_pytest(" ".join(COMMAND), expect_timeout=180)
    child.expect(pexpect.EOF)
    return child.before.decode()


def test_the_step_of_the_running_trial_is_shown_and_taken_back(screen: str) -> None:
    shown = re.findall(r" \[clean attempt 1, step \d+/14\]", screen)
    assert shown
    # A backspace for each character, then blanks over it: pytest's own dot follows in its place.
    assert screen.count("\b") >= len(shown[0])
    line = next(line for line in screen.splitlines() if line.startswith("chaos "))
    assert after_backspaces(line).split() == ["chaos", ".", "[100%]"]


def after_backspaces(text: str) -> str:
    """What is left to see on a terminal."""
    cells: list[str] = []
    column = 0
    for character in text:
        if character == "\b":
            column -= 1
            continue
        cells[column : column + 1] = character
        column += 1
    return "".join(cells)
