"""The pre-flight's pytest items, which exist without any test file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from seatrial.chaos.errors import UsageError

from .preflight import PlannedTrial
from .runner import TrialFailedError

if TYPE_CHECKING:
    from .session_plugin import ChaosPlugin


class Preflight(pytest.Collector):
    """The parent of all bundled trials; its node id is ``chaos``."""

    def __init__(
        self, *, planned: Sequence[PlannedTrial], plugin: ChaosPlugin, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._planned = planned
        self._plugin = plugin

    def collect(self) -> Iterable[pytest.Item]:
        for planned in self._planned:
            # As text, so that pytest takes it apart as it will when --lf reads it from its cache.
            yield TrialItem.from_parent(
                self,
                name=planned.name,
                nodeid=f"{self.nodeid}::{planned.name}",
                planned=planned,
                plugin=self._plugin,
            )


class TrialItem(pytest.Item):
    """One trial as a test; ``chaos::kill[rank1-step12-backward]``."""

    def __init__(self, *, planned: PlannedTrial, plugin: ChaosPlugin, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._planned = planned
        self._plugin = plugin
        self.add_marker("chaos")

    def runtest(self) -> None:
        if self._planned.skip:
            pytest.skip(self._planned.skip)
        try:
            self._plugin.runner.run_item(self._planned, self)
        except UsageError as error:
            # Nothing can be proved about this job: the other trials would say the same.
            self._plugin.unusable(str(error))
            self.session.shouldfail = str(error)
            raise TrialFailedError(str(error)) from None

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, TrialFailedError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name
