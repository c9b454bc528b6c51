"""Whatever cannot be run: exit code 4, one sentence, and nothing left behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

RunPytest = Callable[..., pytest.RunResult]


def error_lines(result: pytest.RunResult) -> list[str]:
    """The lines that say what is wrong, on whichever stream."""
    lines = [line for line in result.errlines + result.outlines if line.strip()]
    return [line for line in lines if line.startswith("ERROR:")]


def assert_refused(result: pytest.RunResult, *words: str) -> None:
    """One line with all the words, exit code 4, no traceback."""
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = error_lines(result)
    for word in words:
        assert word in line
    assert "Traceback" not in result.stdout.str() + result.stderr.str()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--chaos-job=gtp"], ["'gtp'", "gpt", "module:Class"]),
        (["--chaos-job=no_such_module:Job"], ["'no_such_module:Job'"]),
        (["--chaos-job=missing.py:Job"], ["'missing.py:Job'", "there is no file missing.py in"]),
        (["--chaos-artifacts=file.txt"], ["--chaos-artifacts", "file.txt: Not a directory"]),
        (["--chaos-artifacts=file.txt/below"], ["--chaos-artifacts", "file.txt: Not a directory"]),
        (
            ["--chaos-artifacts=/proc/below"],
            ["--chaos-artifacts", "/proc: "],
        ),
        (["--chaos-topology=dp3"], ["dp3", "3 ranks", "2"]),
        (["--chaos-topology=xp2"], ["xp2", "dp, fsdp"]),
        (["--chaos-topology=dp2-dp1"], ["'dp' twice"]),
        (["--chaos-topology=tp2-pp2"], ["tp2-pp2", "needs 4 ranks (tp 2 x pp 2)", "has 2"]),
        (["--chaos-topology=hsdp2"], ["'hsdp2'", "hsdp2x2"]),
        (["--chaos-topology=zero1-fsdp2"], ["zero1", "dp ranks alone"]),
        (["--chaos-topology=ep2"], ["cannot run on ep2", "no experts", "set experts=4"]),
        (["--chaos-topology=tp3", "--chaos-ranks=3"], ["heads=2 do not divide over 3"]),
        (["--chaos-reshard=dp4,xp2"], ["--chaos-reshard", "xp2", "dp, fsdp"]),
        (["--chaos-reshard=dp4,cp3"], ["cannot run on cp3", "does not divide over 3"]),
        (["--chaos-reshard=dp4,tp2,dp4"], ["--chaos-reshard", "names dp4 twice"]),
        (["--chaos-reshard=dp4:"], ["--chaos-reshard", "''"]),
        (["--chaos-reshard=dp4:dp1,dp4:cp3"], ["cannot run on cp3", "does not divide over 3"]),
        (["--chaos-reshard=dp4:dp1:dp4:dp1"], ["takes 4 restarts, the limit is 3"]),
        (["--chaos-reshard=dp4:dp1:dp4"], ["needs 17 steps", "the run has 14"]),
        (["--chaos-ranks=0"], ["--chaos-ranks", "'0'", "from 1"]),
        (["--chaos-ranks=two"], ["--chaos-ranks", "'two'"]),
        (["--chaos-ranks=3", "--chaos-nodes=2"], ["3 ranks", "2 node"]),
        (["--chaos-device=tpu"], ["'tpu'", "auto, cpu, cuda"]),
        (["--chaos-launcher=ssh"], ["'ssh'", "fork, spawn, torchrun, hosts"]),
        (["--chaos-launcher=hosts"], ["joins 2 to 99 hosts", "--chaos-nodes, which is 1"]),
        (
            ["--chaos-fault=partition node=0 at=data"],
            ["can never fire", "add --chaos-launcher hosts"],
        ),
        (["--chaos-steps=-1"], ["--chaos-steps", "'-1'"]),
        (["--chaos-steps=7"], ["7", "--chaos-steps"]),
        (["--chaos-seed=-1"], ["--chaos-seed", "'-1'"]),
        (["--chaos-timeout=0"], ["--chaos-timeout", "above 0"]),
        (["--chaos-timeout=nan"], ["--chaos-timeout", "above 0"]),
        (["--chaos-run-limit=-1"], ["--chaos-run-limit", "above 0"]),
        (["--chaos-max-restarts=-1"], ["--chaos-max-restarts"]),
        (["--chaos-max-restarts=1"], ["restarts a run up to 3 times", "--chaos-max-restarts"]),
        (
            ["--chaos-fault=kill rank=1 at=data; kill rank=1 at=data attempt=9"],
            ["can never fire", "at most 4 attempts"],
        ),
        (
            ["--chaos-fault=kill rank=1 at=data; kill rank=0 at=restore/quarantine"],
            ["can never fire", "damages a checkpoint"],
        ),
        (["--chaos-fault=kill rank=2 at=data"], ["can never fire", "2 ranks"]),
        (["--chaos-fault=kill rank=1 at=step:15/data"], ["can never fire", "step 14"]),
        (["--chaos-fault=kill rank=1 at=step:0/data"], ["can never fire"]),
        (["--chaos-fault=kill rank=1 at=restore"], ["can never fire"]),
        (["--chaos-fault=kil rank=1 at=data"], ["'kil'", "kill, stop"]),
        (["--chaos-fault=kill rank=1 at=dta"], ["'dta'", "data, data/record, forward"]),
        (["--chaos-fault=;"], ["empty fault"]),
        (["--chaos-text=missing.txt"], ["--chaos-text", "missing.txt", "No such file"]),
        (["--chaos-text=."], ["--chaos-text", "directory"]),
        (["--chaos-param=width"], ["--chaos-param", "'width'", "KEY=VALUE"]),
        (["--chaos-param=a-b=3"], ["--chaos-param", "KEY=VALUE"]),
        (["--chaos-powerloss=btrfs"], ["--chaos-powerloss", "fuse, ext4, xfs"]),
        (["--chaos-disk=ext4"], ["--chaos-disk 'ext4'", "choose one of fuse"]),
        (["--chaos-disk=fuse", "--chaos-store=x"], ["brings its own disk", "--chaos-store"]),
        (["--chaos-disk=fuse", "--chaos-powerloss=ext4"], ["is not observed", "--chaos-disk"]),
        (["--chaos-fault=powercut rank=* at=data"], ["can never fire", "--chaos-powerloss fuse"]),
        (["--chaos-store=memory://x"], ["--chaos-store", "a memory of its own"]),
        (["--chaos-store=nosuch://x"], ["--chaos-store", "Protocol not known: nosuch"]),
        (["--chaos-store=simplecache::s3://bucket/x"], ["--chaos-store", "without a chain"]),
        (["--chaos-store=file.txt"], ["--chaos-store", "file.txt"]),
        (["--chaos-store=file.txt/below"], ["--chaos-store", "Not a directory"]),
        (["--chaos-store=/proc/seatrial/store"], ["--chaos-store", "/proc/seatrial/store"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_an_option_that_cannot_be_used_is_refused_before_anything_starts(
    pytester: pytest.Pytester,
    configure_pytest: RunPytest,
    temporary: Path,
    options: list[str],
    words: list[str],
) -> None:
    (pytester.path / "file.txt").write_text("")
    assert_refused(configure_pytest("--chaos", "-p", "no:cacheprovider", *options), *words)
    own = {"file.txt", "temporary", "stdout", "stderr"}  # the last two are pytester's
    left = [path.name for path in pytester.path.iterdir() if path.name not in own]
    assert [name for name in left if not name.startswith("runpytest-")] == []
    assert list(temporary.iterdir()) == []


def test_an_empty_text_is_refused(pytester: pytest.Pytester, run_pytest: RunPytest) -> None:
    (pytester.path / "empty.txt").write_text("")
    assert_refused(run_pytest("--chaos", "--chaos-text=empty.txt"), "--chaos-text", "empty")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_store_without_write_permission_is_refused(
    pytester: pytest.Pytester, run_pytest: RunPytest
) -> None:
    store = pytester.path / "store"
    store.mkdir(mode=0o500)
    assert_refused(run_pytest("--chaos", "--chaos-store=store"), "Permission denied")


@pytest.mark.parametrize(
    ("ini", "words"),
    [
        ("chaos_steps = many", ["'many'", "a whole number"]),
        ("chaos_ranks = 0", ["'0'", "from 1"]),
        ("chaos_timeout = soon", ["'soon'", "seconds"]),
        ("chaos_fault = kill rank=9 at=data", ["can never fire"]),
        ("chaos_launcher = ssh", ["'ssh'"]),
    ],
)
def test_a_bad_value_in_the_ini_file_is_refused(
    pytester: pytest.Pytester, run_pytest: RunPytest, ini: str, words: list[str]
) -> None:
    pytester.makeini(f"[pytest]\n{ini}\n")
    assert_refused(run_pytest("--chaos"), *words)


def test_a_bad_value_in_the_ini_file_does_not_disturb_a_plain_run(
    pytester: pytest.Pytester, run_pytest: RunPytest
) -> None:
    pytester.makeini("[pytest]\nchaos_steps = many\n")
    pytester.makepyfile("def test_one(): pass")
    run_pytest().assert_outcomes(passed=1)


@pytest.mark.parametrize("workers", [("-n2",), ("-p", "no:xdist")])
def test_a_nondeterministic_job_ends_the_session_with_component_step_and_causes(
    run_pytest: RunPytest, temporary: Path, workers: tuple[str, ...]
) -> None:
    result = run_pytest("tiny", "--chaos-param=bug=depends on time", *workers)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    text = result.stdout.str() + result.stderr.str()
    assert "first in optimizer, attempt 1, step 1" in text
    assert "Usual causes" in text
    assert "Traceback" not in text
    assert list(temporary.iterdir()) == []


def test_a_job_that_crashes_by_itself_ends_the_session_with_the_cause(
    run_pytest: RunPytest, temporary: Path
) -> None:
    result = run_pytest("tiny", "--chaos-param=bug=crashes", "-k", "clean or backward")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "the data set is not where it was" in result.stdout.str() + result.stderr.str()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("job", "source", "words"),
    [
        ("broken:Job", "import no_such_module_at_all\n", "No module named 'no_such_module_at_all'"),
        ("broken.py:Job", "import no_such_module\n", "No module named 'no_such_module'"),
        ("broken.py:Job", "class Other: pass\n", "has no Job"),
        ("broken:Job", "class Job:\n    def build(self, context): pass\n", "has no method step"),
    ],
    ids=["module does not import", "file does not import", "no class", "no step"],
)
def test_a_job_that_cannot_be_made_ends_the_session_with_the_cause(
    pytester: pytest.Pytester,
    run_pytest: RunPytest,
    temporary: Path,
    job: str,
    source: str,
    words: str,
) -> None:
    pytester.makepyfile(broken=source)
    result = run_pytest("--chaos", f"--chaos-job={job}", "-k", "clean or backward")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert words in result.stdout.str() + result.stderr.str()
    assert list(temporary.iterdir()) == []
