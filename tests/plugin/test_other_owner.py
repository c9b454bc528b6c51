"""Another installed plugin that has an option --chaos of its own, as the package ordeal does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

RunPytest = Callable[..., pytest.RunResult]

PLUGIN = """
def pytest_addoption(parser):
    parser.getgroup("ordeal").addoption("--chaos", action="store_true", help="ordeal's")
"""


@pytest.fixture
def ordeal(pytester: pytest.Pytester) -> None:
    """The plugin as installed: a distribution with an entry point, on the import path."""
    pytester.makepyfile(ordeal_plugin=PLUGIN, test_ordinary="def test_one(): pass")
    information = pytester.mkdir("ordeal-0.1.dist-info")
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: ordeal\nVersion: 0.1\n")
    (information / "entry_points.txt").write_text("[pytest11]\nordeal = ordeal_plugin\n")


@pytest.mark.usefixtures("ordeal")
def test_a_plain_run_is_not_disturbed(run_pytest: RunPytest) -> None:
    run_pytest("-q").assert_outcomes(passed=1)


@pytest.mark.usefixtures("ordeal")
def test_asking_for_chaos_is_explained_in_one_line(run_pytest: RunPytest) -> None:
    result = run_pytest("--chaos")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in result.errlines if line.startswith("ERROR:")]
    assert "'ordeal' also has an option --chaos" in line
    assert "-p no:ordeal" in line
    assert "Traceback" not in result.stderr.str() + result.stdout.str()


@pytest.mark.usefixtures("ordeal")
def test_turning_the_other_plugin_off_gives_chaos_back(run_pytest: RunPytest) -> None:
    result = run_pytest("-p", "no:ordeal", "--chaos", "--collect-only", "-q")
    assert result.ret == 0
    assert "chaos::clean" in result.outlines


@pytest.mark.usefixtures("ordeal")
def test_turning_seatrial_off_gives_the_other_plugin_its_option(run_pytest: RunPytest) -> None:
    run_pytest("-p", "no:seatrial", "--chaos").assert_outcomes(passed=1)


def test_an_unknown_plugin_that_comes_first_is_explained_too(
    pytester: pytest.Pytester, run_pytest: RunPytest
) -> None:
    pytester.makepyfile(somebody=PLUGIN, test_ordinary="def test_one(): pass")
    result = run_pytest("-p", "somebody", "--chaos")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in result.errlines if line.startswith("ERROR:")]
    assert "another plugin also has an option --chaos" in line
    assert "Traceback" not in result.stderr.str() + result.stdout.str()


def test_an_unknown_plugin_that_comes_first_does_not_disturb_a_plain_run(
    pytester: pytest.Pytester, run_pytest: RunPytest
) -> None:
    pytester.makepyfile(somebody=PLUGIN, test_ordinary="def test_one(): pass")
    run_pytest("-p", "somebody", "-q").assert_outcomes(passed=1)
