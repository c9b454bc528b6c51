"""A line on the terminal that shows the step of the running trial, and leaves no trace.

The text is written behind what pytest has printed and taken back with backspaces, so pytest's own
output is the same with and without it. Silent where the output is not a terminal, under xdist, and
with ``-q``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from seatrial.chaos.supervisor import Progress

_INTERVAL_S = 0.1
_WIDTH_MAX = 40


class ProgressLine:
    """Writes to the real standard output of the pytest process, past its capturing."""

    def __init__(self, config: pytest.Config) -> None:
        self._capture = config.pluginmanager.getplugin("capturemanager")
        reporter = config.pluginmanager.getplugin("terminalreporter")
        self._is_on = (
            reporter is not None
            and reporter.isatty
            and config.option.verbose >= 0
            and not hasattr(config, "workerinput")
        )
        self._shown = ""
        self._next_t = 0.0

    @contextmanager
    def of(self, name: str, steps: int) -> Iterator[Progress]:
        """Show the progress of one trial; gives the function to call at every step."""

        def report(attempt: int, step: int) -> None:
            if self._is_on and time.monotonic() >= self._next_t:
                self._next_t = time.monotonic() + _INTERVAL_S
                self._show(f" [{name[:_WIDTH_MAX]} attempt {attempt}, step {step}/{steps}]")

        try:
            yield report
        finally:
            if self._shown:
                self._show("")

    def _show(self, text: str) -> None:
        width = len(self._shown)
        blank = " " * max(0, width - len(text))
        back = "\b" * max(width, len(text))
        self._shown = text
        if self._capture is None:
            self._write(text + blank + back)
            return
        with self._capture.global_and_fixture_disabled():
            self._write(text + blank + back)

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
