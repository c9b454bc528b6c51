"""What the plugin costs and changes for those who do not ask for it: nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from seatrial.plugins.option_table import OPTIONS

RunPytest = Callable[..., pytest.RunResult]


@pytest.fixture
def ordinary_tests(pytester: pytest.Pytester) -> None:
    """Two tests, and a conftest that says at the end what was imported."""
    pytester.makepyfile(test_ordinary="def test_one(): pass\ndef test_two(): pass\n")
    pytester.makeconftest(
        """
        import sys

        def pytest_unconfigure(config):
            heavy = [name for name in ("torch", "numpy", "seatrial.chaos", "seatrial.recovery",
                                       "seatrial.plugins.options", "hypothesis.core")
                     if name in sys.modules]
            print(f"imported: {heavy}")
        """
    )


@pytest.mark.usefixtures("ordinary_tests")
def test_a_plain_run_imports_neither_torch_nor_the_rest_of_seatrial(run_pytest: RunPytest) -> None:
    result = run_pytest("-s", "-p", "no:hypothesispytest")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["imported: []"])


@pytest.mark.usefixtures("ordinary_tests")
def test_a_plain_run_collects_what_it_would_without_the_plugin(run_pytest: RunPytest) -> None:
    with_plugin = run_pytest("--collect-only", "-q")
    without = run_pytest("--collect-only", "-q", "-p", "no:seatrial")
    assert [line for line in with_plugin.outlines if "::" in line] == [
        line for line in without.outlines if "::" in line
    ]
    assert without.ret == with_plugin.ret == 0


def test_a_test_that_uses_chaos_trial_is_skipped_with_the_reason(
    pytester: pytest.Pytester, run_pytest: RunPytest
) -> None:
    pytester.makepyfile("def test_recovery(chaos_trial): raise AssertionError('it ran')")
    result = run_pytest("-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*run pytest with --chaos*"])


def test_the_marker_is_registered(pytester: pytest.Pytester, run_pytest: RunPytest) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.chaos(ranks=2)\ndef test_it(): pass")
    run_pytest("--strict-markers").assert_outcomes(passed=1)


def test_all_options_are_in_one_group_of_the_help(run_pytest: RunPytest) -> None:
    lines = run_pytest("--help").outlines
    options = [number for number, line in enumerate(lines) if line.startswith("  --chaos")]
    assert len(options) == len(OPTIONS) + 1
    between = lines[options[0] : options[-1]]
    assert all(line.startswith("  ") for line in between)
