"""Verifies that what a test says wrongly of its trial is an error in one sentence, before anything
is launched, and never a trial other than the one that was meant."""

from __future__ import annotations

from collections.abc import Callable

import pytest

RunPytest = Callable[..., pytest.RunResult]

WRONG = {
    "ranks='two'": "ranks='two' is not a whole number from 1",
    "ranks=2.5": "ranks=2.5 is not a whole number from 1",
    "ranks=None": "ranks=None is not a whole number from 1",
    "checkpoint_interval=0": "checkpoint_interval=0 is not a whole number from 1",
    "timeout=-1": "timeout=-1 is not a number of seconds above 0",
    "max_restarts=-1": "max_restarts=-1 is not a whole number from 0",
    "job=None": "job=None is not text",
    "params=['a=1']": "params=['a=1'] is not a mapping of names to values",
    "param='a=1'": "param='a=1' is not a list of KEY=VALUE",
    "omit='rng', schedule='kill rank=1 at=data'": "omit='rng' is a control: it runs without faults",
    "omit='rng', expect='STOPPED'": "omit='rng' is a control: it runs without faults",
    "schedule=None": "None is no schedule; give text, or a seatrial.chaos.Schedule",
    "schedule=['clean']": "['clean'] is no schedule; give text",
}


def test_a_wrong_argument_is_one_sentence_at_the_line_of_the_call(
    pytester: pytest.Pytester, run_pytest: RunPytest
) -> None:
    tests = "".join(
        f"def test_{number}(chaos_trial):\n    chaos_trial({call})\n"
        for number, call in enumerate(WRONG)
    )
    pytester.makepyfile(test_wrong=tests)
    result = run_pytest("--chaos", "test_wrong.py")
    result.assert_outcomes(failed=len(WRONG))
    said = [line for line in result.outlines if line.startswith("E  ")]
    for call, expected in WRONG.items():
        assert any(expected in line for line in said), call
    assert "options.py" not in result.stdout.str()  # none of our lines


def test_a_test_that_puts_nothing_on_trial_does_not_pass(
    pytester: pytest.Pytester, run_pytest: RunPytest
) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.chaos("kill rank=1 at=data")
        def test_marker(chaos_trial):
            chaos_trial()

        @pytest.fixture
        def mine(chaos_trial):
            return chaos_trial

        def test_loop(mine):
            for schedule in ():
                mine(schedule)

        def test_skips(chaos_trial):
            pytest.skip("not today")
        """
    )
    result = run_pytest("--chaos", "-k", "marker or loop or skips")
    result.assert_outcomes(failed=2, skipped=1)
    result.stdout.fnmatch_lines_random(
        ["E *the marker chaos('kill rank=1 at=data') takes options by name*", "*never calls it*"]
    )


@pytest.mark.parametrize("word", ["--chaos-fault=kill rank=1 at=data", "--chaos-ranks=4"])
def test_an_option_that_was_typed_without_chaos_is_refused(
    pytester: pytest.Pytester, configure_pytest: RunPytest, word: str
) -> None:
    pytester.makepyfile("def test_one(): pass")
    result = configure_pytest(word)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {word.partition('=')[0]} does nothing without --chaos*"])


def test_options_in_addopts_wait_for_chaos(
    pytester: pytest.Pytester, configure_pytest: RunPytest
) -> None:
    pytester.makepyfile("def test_one(): pass")
    pytester.makeini("[pytest]\naddopts = --chaos-ranks=4")
    configure_pytest().assert_outcomes(passed=1)
