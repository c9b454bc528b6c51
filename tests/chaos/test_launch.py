"""What ranks are given and who owns them, under every launcher.

Does not verify: several hosts (see `tests/network`), or NCCL.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from seatrial.chaos.errors import LaunchError, UsageError
from seatrial.chaos.launch.launcher import HOSTS, METHODS, LocalLauncher
from seatrial.chaos.launch.processes import descendants
from seatrial.chaos.launch.torchrun_agent import parsed
from seatrial.chaos.run import Run

SuperviseProgram = Callable[..., Run]


@pytest.fixture(scope="module", params=[each for each in METHODS if each != HOSTS])
def any_launcher(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalLauncher]:
    """A launcher of each kind; the warm one is shared with other modules."""
    if request.param == "fork":
        yield request.getfixturevalue("launcher")
        return
    with LocalLauncher(method=request.param, scratch=[tmp_path_factory.mktemp("scratch")]) as cold:
        yield cold


def recorded(run: Run, rank: int, kind: str, attempt: int = 1) -> Any:
    """The only record of a kind that a rank left."""
    (record,) = [each for each in run.trace(attempt, rank) if each["kind"] == kind]
    return record


def test_every_launcher_gives_ranks_the_same_contract_and_restarts_them(
    supervise_program: SuperviseProgram, any_launcher: LocalLauncher
) -> None:
    schedule = "kill rank=1 at=step:2/backward; exit rank=0 at=step:2/forward code=42 attempt=2"
    run = supervise_program("describe_environment", schedule, by=any_launcher, max_restarts=2)

    killed, left, completed = run.attempts
    assert (killed.ending, killed.culprit, killed.exits[1]) == ("failed", 1, -signal.SIGKILL)
    assert (left.ending, left.culprit, left.exits[0]) == ("failed", 0, 42)
    assert (completed.ending, completed.exits) == ("completed", {0: 0, 1: 0})

    forked = supervise_program("describe_environment")
    for attempt in (1, 2, 3):
        for rank in (0, 1):
            found = recorded(run, rank, "environment", attempt)
            assert found["variables"] == {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "GROUP_RANK": "0",
                "GROUP_WORLD_SIZE": "1",
                "ROLE_RANK": str(rank),
                "ROLE_WORLD_SIZE": "2",
                "TORCHELASTIC_RESTART_COUNT": str(attempt - 1),
                "TORCHELASTIC_MAX_RESTARTS": "2",
                "TORCHELASTIC_RUN_ID": "run",
            }
            assert found["has_master"]
            assert found["tmpdir"] == "tmp"
            assert (found["backend"], found["threads"]) == ("gloo", 1)
            assert found["drawn"] == recorded(forked, rank, "environment")["drawn"]


def test_variables_of_another_torchrun_do_not_reach_ours_and_are_left_to_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PET_STANDALONE", "1")
    monkeypatch.setenv("PET_NODE_RANK", "7")
    read = parsed(["--nnodes=2", "--nproc-per-node=1", "program.py"])
    assert (read.standalone, read.node_rank) == (False, 0)
    assert os.environ["PET_NODE_RANK"] == "7"


def test_no_thread_of_gloo_takes_the_processor_of_another(
    supervise_program: SuperviseProgram, any_launcher: LocalLauncher
) -> None:
    run = supervise_program("describe_environment", by=any_launcher)
    for rank in (0, 1):
        policies = recorded(run, rank, "environment")["policies"]
        assert len(policies) >= 3
        assert set(policies) == {os.SCHED_BATCH}


def test_each_rank_draws_its_own_random_numbers(supervise_program: SuperviseProgram) -> None:
    run = supervise_program("describe_environment")
    drawn = [recorded(run, rank, "environment")["drawn"] for rank in (0, 1)]
    assert drawn[0] != drawn[1]


def test_a_job_is_told_rank_node_and_attempt(supervise_program: SuperviseProgram) -> None:
    run = supervise_program(
        "describe_environment", "kill rank=* at=exit", ranks=4, nodes=2, max_restarts=1
    )
    for attempt in (1, 2):
        for rank in range(4):
            found = recorded(run, rank, "environment", attempt)
            assert found["told"] == {
                "rank": rank,
                "world": 4,
                "local": rank % 2,
                "node": rank // 2,
                "attempt": attempt,
                "seed": 3,
            }
            variables = found["variables"]
            assert variables["GROUP_RANK"] == str(rank // 2)
            assert variables["LOCAL_RANK"] == str(rank % 2)
            assert variables["TORCHELASTIC_RESTART_COUNT"] == str(attempt - 1)


def test_every_process_group_has_the_timeout_of_the_plan(
    supervise_program: SuperviseProgram,
) -> None:
    run = supervise_program("describe_timeouts", silence_s=17.0)
    found = recorded(run, 0, "timeouts")
    assert found["groups"] == dict.fromkeys(
        ["default", "new_group", "subgroups", "mesh dp", "mesh tp"], found["plan"]
    )


def test_a_module_that_starts_a_thread_makes_ranks_spawn_and_says_so(
    supervise_program: SuperviseProgram, tmp_path: Path
) -> None:
    with LocalLauncher(method="fork", scratch=[tmp_path], preload=("starts_a_thread",)) as launcher:
        assert launcher.method == "spawn"
        assert "spawned, not forked" in launcher.note
        assert "1 thread" in launcher.note
        run = supervise_program("train", by=launcher)
    assert run.completed


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("initialises_cuda", "initialised CUDA"),
        ("starts_the_cuda_driver", "started the CUDA driver"),
    ],
)
def test_a_module_that_initialises_cuda_makes_ranks_spawn_and_says_so(
    tmp_path: Path, module: str, said: str
) -> None:
    with LocalLauncher(method="fork", scratch=[tmp_path], preload=(module,)) as launcher:
        assert launcher.method == "spawn"
        assert said in launcher.note


def test_a_clean_warm_parent_forks_without_a_note(launcher: LocalLauncher) -> None:
    assert (launcher.method, launcher.note) == ("fork", "")


def test_a_job_whose_module_does_not_import_is_refused_with_the_cause(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be imported: .*No module named 'no_such_module'"):
        LocalLauncher(method="fork", scratch=[tmp_path], preload=("no_such_module",))


def test_an_unknown_method_is_refused_with_the_valid_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'ssh'; choose one of fork, spawn, torchrun"):
        LocalLauncher(method="ssh", scratch=[tmp_path])


@pytest.fixture
def cold_launcher(tmp_path: Path) -> Iterator[LocalLauncher]:
    """A launcher of this test's own, which it may destroy."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with LocalLauncher(method="spawn", scratch=[scratch]) as launcher:
        yield launcher


def test_a_custodian_that_is_killed_is_a_launch_error(
    supervise_program: SuperviseProgram, cold_launcher: LocalLauncher
) -> None:
    os.kill(cold_launcher._process.pid, signal.SIGKILL)
    with pytest.raises(LaunchError, match="ended unexpectedly") as caught:
        supervise_program("hang", by=cold_launcher)
    assert f"status {-signal.SIGKILL}" in str(caught.value)


def test_closing_a_launcher_ends_its_custodian_and_twice_is_fine(
    cold_launcher: LocalLauncher,
) -> None:
    assert cold_launcher._process.pid in descendants(os.getpid())
    cold_launcher.close()
    cold_launcher.close()
    assert cold_launcher._process.pid not in descendants(os.getpid())


def test_a_rank_that_torchrun_ended_itself_is_not_said_to_have_died_of_the_signal(
    supervise_program: SuperviseProgram, tmp_path: Path
) -> None:
    with LocalLauncher(method="torchrun", scratch=[tmp_path], preload=()) as launcher:
        run = supervise_program(
            "ignore_sigterm_and_see_a_peer_fail",
            "terminate rank=1 at=data grace=60",
            by=launcher,
        )
    attempt = run.attempts[0]
    assert (attempt.culprit, attempt.exits) == (0, {0: 1})


def test_a_rank_that_leaves_at_once_does_not_break_its_peers_rendezvous(
    supervise_program: SuperviseProgram,
) -> None:
    """Without the barrier after the rendezvous, 3 of 100 such runs failed."""
    for _ in range(40):
        run = supervise_program("leave")
        assert run.completed, run.attempts[0].cause
