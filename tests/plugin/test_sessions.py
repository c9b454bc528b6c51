"""Trials inside pytest: what passes, what fails and how it says so, under pytest's own options."""

from __future__ import annotations

import shlex
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

RunPytest = Callable[..., pytest.RunResult]

KILL = "kill rank=1 at=step:5/backward"
NEVER = "kill rank=1 at=step:5/backward nth=2"


def test_several_workers_share_one_reference_and_report_every_trial_once(
    pytester: pytest.Pytester, run_pytest: RunPytest, temporary: Path
) -> None:
    log = pytester.path / "built"
    result = run_pytest(
        *("tiny", "-n2", "-v", "--junitxml=report.xml", f"--chaos-param=log={log}"),
        *(f"--chaos-fault={KILL}", f"--chaos-fault={NEVER}", "--chaos-fault=clean"),
    )
    result.assert_outcomes(passed=2, failed=1)

    # Two ranks each: the reference is run twice, KILL has two attempts, the others one.
    assert len(log.read_text().splitlines()) == 2 * (2 + 2 + 1 + 1)

    result.stdout.fnmatch_lines_random(
        [
            "*PASSED chaos::kill[[]rank1-step5-backward[]]*",
            "*FAILED chaos::kill[[]rank1-step5-backward-nth2[]]*",
            "*PASSED chaos::clean*",
            "trial * verdict * attempts * steps lost * recovered in",
            "kill[[]rank1-step5-backward[]] *RECOVERED * 2 * 0 * s",
            "kill[[]*-step5-backward-nth2[]] *NOT_EXERCISED * 1 * 0 * -",
            "clean *RECOVERED * 1 * 0 * -",
            "2 of 3 trials as expected*",
        ]
    )

    cases = {
        case.attrib["name"]: {each.attrib["name"]: each.attrib["value"] for each in properties}
        for case in ElementTree.parse(pytester.path / "report.xml").iter("testcase")
        for properties in case.iter("properties")
    }
    killed = cases["kill[rank1-step5-backward]"]
    assert killed["chaos_fault"] == KILL
    assert killed["chaos_verdict"] == "RECOVERED"
    assert (killed["chaos_attempts"], killed["chaos_steps_lost"]) == ("2", "0")
    assert float(killed["chaos_recovery_s"]) > 0
    assert cases["kill[rank1-step5-backward-nth2]"]["chaos_verdict"] == "NOT_EXERCISED"
    assert killed["chaos_slowest_rank"] in ("0", "1")
    assert float(killed["chaos_skew_s"]) > 0
    assert "chaos_stragglers" in killed

    times = result.outlines[result.outlines.index(next(filter(is_of_times, result.outlines))) :]
    assert "clean:" in times
    headings = [line.split() for line in times if line.split()[:2] == ["rank", "0"]]
    assert headings == [["rank", "0", "rank", "1"]] * 3
    assert sum(line.startswith("backward ") for line in times) == 3

    assert list(temporary.iterdir()) == []


def is_of_times(line: str) -> bool:
    return "times in ms: median / 90 % / most" in line


def replay_of(result: pytest.RunResult) -> list[str]:
    """The arguments of the first replay line."""
    line = next(line for line in result.outlines if line.strip().startswith("replay:"))
    command, *arguments = shlex.split(line.split(":", 1)[1])
    assert command == "pytest"
    return arguments


def reason_of(result: pytest.RunResult) -> str:
    return next(line.strip() for line in result.outlines if line.startswith("DIVERGED"))


def test_a_failure_says_why_and_its_replay_line_fails_the_same_way(
    run_pytest: RunPytest, temporary: Path
) -> None:
    fault = f"seed=5; {KILL}"
    first = run_pytest(
        *("tiny", "-p", "no:xdist", "-q", "--chaos-param=bug=forgets the sampler"),
        *(f"--chaos-fault={fault}", "--chaos-artifacts=kept"),
    )
    assert first.ret == pytest.ExitCode.TESTS_FAILED
    assert "DIVERGED instead of RECOVERED" in reason_of(first)
    assert "the samples of rank" in reason_of(first)
    first.stdout.fnmatch_lines(
        [
            f"fault:    {fault}",
            "attempt 1: failed, rank 1 was killed by SIGKILL",
            "attempt 2: completed",
            "replay: *",
            "*rank times*",
            "whole step * / * / *",
        ]
    )
    assert not any(map(is_of_times, first.outlines))

    kept = temporary.parent / "kept" / "kill_rank1-step5-backward"
    assert (kept / "traces" / "attempt2-rank0.jsonl").stat().st_size > 0
    assert (kept / "attempt1" / "rank1.log").exists()

    again = run_pytest(*replay_of(first))
    again.assert_outcomes(failed=1)
    assert reason_of(again) == reason_of(first)
    assert list(temporary.iterdir()) == []


def test_x_stops_at_the_first_failure_and_lf_repeats_it_alone(run_pytest: RunPytest) -> None:
    arguments = ("tiny", "-p", "no:xdist", f"--chaos-fault={NEVER}", "--chaos-fault=clean")
    run_pytest(*arguments, "-x").assert_outcomes(failed=1)
    repeated = run_pytest(*arguments, "--lf")
    repeated.assert_outcomes(failed=1, deselected=1)
    repeated.stdout.fnmatch_lines(["*never fired*"])


def test_a_users_own_tests_run_trials_with_marker_and_call_options(
    pytester: pytest.Pytester, run_pytest: RunPytest, temporary: Path
) -> None:
    pytester.makepyfile(
        test_mine="""
        import pytest

        pytestmark = pytest.mark.chaos(
            job="tiny_job:TinyJob", steps=8, checkpoint_interval=2, device="cpu"
        )
        KILL = "kill rank=1 at=step:5/backward"

        def test_recovers(chaos_trial):
            trial = chaos_trial(KILL)
            assert (trial.verdict, trial.steps_lost) == ("RECOVERED", 0)

        def test_two_trials(chaos_trial):
            chaos_trial("clean")
            chaos_trial("kill rank=0 at=step:3/data")

        def test_call_overrides_marker(chaos_trial):
            chaos_trial(KILL, params={"bug": "forgets the sampler"}, expect="DIVERGED")

        @pytest.mark.chaos(params={"bug": "forgets the sampler"})
        def test_nearest_marker_wins(chaos_trial):
            assert chaos_trial(KILL, expect=None).judgement.component == "sampler"

        def test_left_out(chaos_trial):
            assert chaos_trial(omit="scheduler").judgement.component == "scheduler"

        def test_unexpected_verdict_fails(chaos_trial):
            chaos_trial(KILL, expect="DIVERGED")

        def test_any_verdict_but_not_exercised(chaos_trial):
            chaos_trial(KILL + " nth=2", expect=None)

        def test_unknown_option(chaos_trial):
            chaos_trial(KILL, rank=2)

        def test_unknown_expectation(chaos_trial):
            chaos_trial(KILL, expect="FINE")

        def test_impossible_fault(chaos_trial):
            chaos_trial("kill rank=7 at=data")
        """
    )
    result = run_pytest("--chaos", "-v", "-p", "no:xdist", "test_mine.py")
    result.assert_outcomes(passed=5, failed=5)
    result.stdout.fnmatch_lines_random(
        [
            "*RECOVERED instead of DIVERGED*",
            "*NOT_EXERCISED: the fault * never fired*",
            "*unknown option 'rank'; the options are job, param*",
            "*'FINE'*RECOVERED, STOPPED, DIVERGED*",
            "*fault 'kill rank=7 at=data' can never fire*",
            "*replay: *pytest --chaos test_mine.py::test_unexpected_verdict_fails",
        ]
    )
    assert list(temporary.iterdir()) == []


def test_the_bundled_job_recovers_and_its_control_is_caught(
    run_pytest: RunPytest, temporary: Path
) -> None:
    selected = "rank1-step12-backward and kill and not nth or control[scaler]"
    result = run_pytest("--chaos", "-p", "no:xdist", "-k", selected)
    outcomes = result.parseoutcomes()
    assert outcomes.pop("deselected") > 30
    assert outcomes == {"passed": 2}
    result.stdout.fnmatch_lines(
        [
            "kill[[]rank1-step12-backward[]] *RECOVERED * 2 * 1 * s",
            "control[[]scaler[]] *DIVERGED*",
            "2 of 2 trials as expected*",
        ]
    )
    assert list(temporary.iterdir()) == []


def test_stores_are_made_where_the_user_wants_them_and_removed(
    pytester: pytest.Pytester, run_pytest: RunPytest
) -> None:
    store = pytester.path / "store"
    store.mkdir()
    (store / "precious").write_text("x")
    run_pytest("tiny", f"--chaos-store={store}", f"--chaos-fault={KILL}").assert_outcomes(passed=1)
    assert [path.name for path in store.iterdir()] == ["precious"]
