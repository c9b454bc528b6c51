"""Which trials exist, and under what names, without launching anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

RunPytest = Callable[..., pytest.RunResult]


def node_ids(result: pytest.RunResult) -> list[str]:
    return [line for line in result.outlines if "::" in line]


def test_collecting_launches_nothing(
    pytester: pytest.Pytester, run_pytest: RunPytest, temporary: Path
) -> None:
    pytester.makeconftest(
        """
        import os, sys
        from pathlib import Path

        def pytest_unconfigure(config):
            from seatrial.chaos.launch.processes import descendants
            print(f"torch: {'torch' in sys.modules}, below: {descendants(os.getpid())}")
        """
    )
    result = run_pytest("--chaos", "--collect-only", "-q", "-s")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["torch: False, below: []"])
    assert list(temporary.iterdir()) == []


def test_the_preflight_has_readable_ids(run_pytest: RunPytest) -> None:
    found = node_ids(run_pytest("--chaos", "--collect-only", "-q"))
    for name in (
        "clean",
        "kill[rank1-step12-backward]",
        "kill[rank0-step12-backward]",
        "kill[all-step12-backward]",
        "kill[rank0-step10-checkpoint-manifest-link]",
        "kill[rank0-step10-checkpoint-manifest-link-after]",
        "kill[restore]",
        "stop[rank1-step12-forward]",
        "terminate[rank1-step12-backward]",
        "raise[rank1-step12-backward]",
        "oom[rank1-step12-forward]",
        "fail[disk-full]",
        "fail[read-error]",
        "tear[shard]",
        "swap[shard]",
        "rollback[shard]",
        "flip[shard]",
        "remove[shard]",
        "remove[manifest]",
        "control[scheduler]",
        "control[rng]",
    ):
        assert f"chaos::{name}" in found
    assert len(set(found)) == len(found)


def test_ids_are_the_same_every_time(run_pytest: RunPytest) -> None:
    once, again = (node_ids(run_pytest("--chaos", "--collect-only", "-q")) for _ in range(2))
    assert once == again


@pytest.mark.parametrize(
    ("options", "contains"),
    [
        (("--chaos-steps=9", "--chaos-checkpoint-interval=3"), "kill[rank1-step7-backward]"),
        (("--chaos-ranks=4", "--chaos-nodes=2"), "kill[rank3-step12-backward]"),
        (("--chaos-ranks=1",), "kill[rank0-step12-backward]"),
    ],
)
def test_the_preflight_follows_the_size_of_the_run(
    run_pytest: RunPytest, options: tuple[str, ...], contains: str
) -> None:
    found = node_ids(run_pytest("--chaos", "--collect-only", "-q", *options))
    assert f"chaos::{contains}" in found


def test_k_selects_by_name(run_pytest: RunPytest) -> None:
    result = run_pytest("--chaos", "--collect-only", "-q", "-k", "restore or flip")
    found = node_ids(result)
    assert "chaos::kill[restore]" in found
    assert "chaos::flip[shard]" in found
    assert "chaos::clean" not in found


def test_given_faults_replace_the_bundled_ones(run_pytest: RunPytest) -> None:
    fault = "kill rank=1 at=step:12/backward"
    result = run_pytest("--chaos", "--collect-only", "-q", f"--chaos-fault={fault}")
    assert node_ids(result) == ["chaos::kill[rank1-step12-backward]"]


def test_the_same_fault_three_times_has_three_ids(run_pytest: RunPytest) -> None:
    same = ["--chaos-fault=kill rank=1 at=step:12/backward"] * 3
    found = node_ids(run_pytest("--chaos", "--collect-only", "-q", *same))
    assert len(set(found)) == 3


@pytest.fixture
def mixed_tests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_mixed="""
        import pytest

        def test_ordinary(): pass
        def test_with_fixture(chaos_trial): pass
        @pytest.mark.chaos
        def test_with_marker(): pass
        """
    )


@pytest.mark.usefixtures("mixed_tests")
def test_a_bare_run_keeps_trials_and_tests_about_chaos_only(run_pytest: RunPytest) -> None:
    result = run_pytest("--chaos", "--collect-only", "-q")
    found = node_ids(result)
    assert "chaos::clean" in found
    assert "test_mixed.py::test_with_fixture" in found
    assert "test_mixed.py::test_with_marker" in found
    assert "test_mixed.py::test_ordinary" not in found
    result.stdout.fnmatch_lines(["*1 deselected*"])


@pytest.mark.usefixtures("mixed_tests")
def test_naming_a_file_runs_that_file_and_no_preflight(run_pytest: RunPytest) -> None:
    result = run_pytest("--chaos", "--collect-only", "-q", "test_mixed.py")
    assert node_ids(result) == [
        f"test_mixed.py::test_{name}" for name in ("ordinary", "with_fixture", "with_marker")
    ]


@pytest.mark.usefixtures("mixed_tests")
def test_a_replayed_fault_runs_nothing_else(run_pytest: RunPytest) -> None:
    result = run_pytest("--chaos", "--collect-only", "-q", "--chaos-fault=clean")
    assert node_ids(result) == ["chaos::clean"]


def test_options_may_stand_in_the_ini_file_and_the_command_line_wins(
    pytester: pytest.Pytester, run_pytest: RunPytest
) -> None:
    pytester.makeini("[pytest]\nchaos_steps = 9\nchaos_checkpoint_interval = 3\n")
    found = node_ids(run_pytest("--chaos", "--collect-only", "-q"))
    assert "chaos::kill[rank1-step7-backward]" in found
    found = node_ids(run_pytest("--chaos", "--collect-only", "-q", "--chaos-checkpoint-interval=2"))
    assert "chaos::kill[rank1-step5-backward]" in found


def test_faults_may_stand_in_the_ini_file_one_a_line(
    pytester: pytest.Pytester, run_pytest: RunPytest
) -> None:
    pytester.makeini("[pytest]\nchaos_fault =\n    clean\n    kill rank=0 at=step:3/data\n")
    found = node_ids(run_pytest("--chaos", "--collect-only", "-q"))
    assert found == ["chaos::clean", "chaos::kill[rank0-step3-data]"]
