"""The pytest entry point: options, the marker, the fixture, and nothing else until ``--chaos``.

Importing this module imports neither torch nor the rest of seatrial, so a user who does not ask
for chaos pays for one small module.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .runner import ChaosTrial

_PLUGIN = "seatrial-session"
_MARKER = (
    "chaos(**options): the test uses chaos_trial; options such as job=, ranks= or steps= are "
    "defaults for its trials"
)


@pytest.hookimpl(trylast=True)
def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    from .option_table import add_options

    owner = _other_owner(pluginmanager)
    if owner is None:
        try:
            add_options(parser)
        except ValueError:
            owner = "another plugin"
    if owner is not None and any(word.split("=")[0] == "--chaos" for word in sys.argv):
        raise pytest.UsageError(
            f"{owner} also has an option --chaos; run with '-p no:NAME' to turn one of the two "
            "plugins off, for example 'pytest -p no:ordeal --chaos' or 'pytest -p no:seatrial'"
        )


def _other_owner(pluginmanager: pytest.PytestPluginManager) -> str | None:
    """The package ordeal declares --chaos too, and whoever comes second ends in a traceback."""
    from importlib.metadata import entry_points

    for entry in entry_points(group="pytest11", name="ordeal"):
        if not pluginmanager.is_blocked(entry.name):
            return f"the installed plugin '{entry.name}'"
    return None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    if config.getoption("chaos_certify", default=None) is not None:  # "" is refused there
        from .certify import CertifyPlugin

        config.pluginmanager.register(CertifyPlugin(config), "seatrial-certify")
    elif config.getoption("--chaos", default=False):
        from .session_plugin import ChaosPlugin

        config.pluginmanager.register(ChaosPlugin(config), _PLUGIN)
    else:
        _refuse_options_without_effect(config)


def _refuse_options_without_effect(config: pytest.Config) -> None:
    """Tests that pass look as if the fault on the command line had been survived.

    Only the words that were typed count: ``addopts`` may hold options for whenever ``--chaos`` is.
    """
    words = [str(word).partition("=")[0] for word in config.invocation_params.args]
    typed = next((word for word in words if word.startswith("--chaos-")), None)
    if typed is not None and not hasattr(config, "workerinput"):
        raise pytest.UsageError(f"{typed} does nothing without --chaos: add it")


@pytest.fixture
def chaos_trial(request: pytest.FixtureRequest) -> ChaosTrial:
    """Runs a job under a fault schedule and returns the verdict; skips without ``--chaos``.

    ``chaos_trial("kill rank=1 at=step:12/backward", job="train.py:MyJob", ranks=2)`` fails the
    test unless the run RECOVERED (or ``expect=`` another verdict) and returns the `Trial`.
    """
    plugin = request.config.pluginmanager.get_plugin(_PLUGIN)
    if plugin is None:
        pytest.skip("chaos_trial launches multi-rank jobs: run pytest with --chaos")
    trial: ChaosTrial = plugin.chaos_trial(request.node)
    return trial
