"""A line on the terminal that shows the step of the running trial, and leaves no trace.

The text is written behind what pytest has printed and taken back with backspaces, so pytest's own
output is the same with and without it. Silent where the output is not a terminal, under xdist, and
with ``-q``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest

from seatrial.chaos.supervisor import Progress

_INTERVAL_S = 0.1
_WIDTH_MAX = 40


class ProgressLine:
    """Writes to the real standard output of the pytest process, past its capturing."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._shown = ""
        self._next_t = 0.0

    @contextmanager
    def of(self, name: str, steps: int) -> Iterator[Progress]:
        """Show the progress of one trial; gives the function to call at every step."""

        is_on = self._is_on()

        def report(attempt: int, step: int) -> None:
            if is_on and time.monotonic() >= self._next_t:
                self._next_t = time.monotonic() + _INTERVAL_S
                self._show(f" [{name[:_WIDTH_MAX]} attempt {attempt}, step {step}/{steps}]")

        try:
            yield report
        finally:
            if self._shown:
                self._show("")

    def _is_on(self) -> bool:
        # Asked late: the terminal reporter is configured after this plugin.
        reporter = self._config.pluginmanager.getplugin("terminalreporter")
        return (
            reporter is not None
            and reporter.isatty
            and self._config.option.verbose >= 0
            and not hasattr(self._config, "workerinput")
        )

    def _show(self, text: str) -> None:
        width = len(self._shown)
        blank = " " * max(0, width - len(text))
        back = "\b" * max(width, len(text))
        self._shown = text
        capture = self._config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture else nullcontext():
            self._write(text + blank + back)

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
