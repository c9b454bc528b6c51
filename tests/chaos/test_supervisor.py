"""How attempts end: each kind of failure, by what evidence it is told from the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial.chaos.inject import pid_file
from seatrial.chaos.launch.launcher import RankExit
from seatrial.chaos.launch.plan import AttemptPlan
from seatrial.chaos.run import Run, load_run
from seatrial.chaos.supervisor import PREEMPTED
from seatrial.chaos.trace import TraceWriter

SuperviseProgram = Callable[..., Run]


def test_a_run_without_faults_completes_in_one_attempt(supervise_program: SuperviseProgram) -> None:
    run = supervise_program("train", max_restarts=3)
    (attempt,) = run.attempts
    assert (attempt.ending, attempt.exits) == ("completed", {0: 0, 1: 0})
    assert (attempt.cause, attempt.output, attempt.culprit) == ("", "", None)


def test_a_run_that_takes_too_long_is_not_said_to_be_silent(
    supervise_program: SuperviseProgram,
) -> None:
    run = supervise_program("pauses", where="in the step", total_s=0.5)
    (attempt,) = run.attempts
    assert attempt.ending == "hung"
    assert "the run was not over after 0.5 s, the most that a run may take" in attempt.cause
    assert "no rank did anything" not in attempt.cause


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_by_sigkill_and_is_the_culprit(
    supervise_program: SuperviseProgram, rank: int
) -> None:
    run = supervise_program("train", f"kill rank={rank} at=step:3/backward")
    (attempt,) = run.attempts
    assert attempt.exits[rank] == -signal.SIGKILL
    assert attempt.culprit == rank
    assert attempt.cause == f"rank {rank} was killed by SIGKILL"


def test_killing_everyone_kills_every_rank_at_once(supervise_program: SuperviseProgram) -> None:
    run = supervise_program("train", "kill rank=* at=step:2/backward", ranks=4)
    assert run.attempts[0].exits == dict.fromkeys(range(4), -signal.SIGKILL)
    assert {strike.rank for strike in run.strikes()} == {0, 1, 2, 3}


def test_killing_a_node_kills_its_ranks(supervise_program: SuperviseProgram) -> None:
    run = supervise_program("train", "kill node=1 at=step:2/backward", ranks=4, nodes=2)
    exits = run.attempts[0].exits
    assert (exits[2], exits[3]) == (-signal.SIGKILL, -signal.SIGKILL)
    assert {strike.rank for strike in run.strikes()} == {2, 3}


def test_a_strike_falls_exactly_where_the_schedule_says(
    supervise_program: SuperviseProgram,
) -> None:
    run = supervise_program("train", "kill rank=1 at=step:3/backward when=after")
    (strike,) = run.strikes()
    assert (strike.step, strike.event, strike.edge) == (3, "backward", "after")
    assert [record["step"] for record in run.trace(1, 1) if record["kind"] == "did"] == [1, 2]


def test_an_exit_fault_leaves_with_its_code(supervise_program: SuperviseProgram) -> None:
    run = supervise_program("train", "exit rank=1 at=step:2/forward code=42")
    assert run.attempts[0].exits[1] == 42
    assert run.attempts[0].cause == "rank 1 left with exit code 42"


def test_a_raise_fault_is_shown_with_its_message_and_traceback(
    supervise_program: SuperviseProgram,
) -> None:
    run = supervise_program("train", "raise rank=1 at=step:2/forward")
    attempt = run.attempts[0]
    assert (attempt.culprit, attempt.exits[1]) == (1, 1)
    assert "InjectedError: injected by the fault 'raise rank=1" in attempt.cause
    assert "Traceback" in attempt.output


def test_an_oom_fault_ends_the_rank_by_lack_of_memory(supervise_program: SuperviseProgram) -> None:
    run = supervise_program("train", "oom rank=1 at=step:2/forward")
    attempt = run.attempts[0]
    assert attempt.culprit == 1
    assert "MemoryError" in attempt.cause


def test_a_stopped_rank_is_ended_by_the_silence_limit(supervise_program: SuperviseProgram) -> None:
    run = supervise_program("train", "stop rank=1 at=step:2/forward", silence_s=1.0)
    attempt = run.attempts[0]
    assert attempt.ending == "hung"
    assert 1 not in attempt.exits
    assert attempt.cause.startswith("no rank did anything for ")


def test_a_stopped_rank_that_is_continued_finishes(supervise_program: SuperviseProgram) -> None:
    run = supervise_program("train", "stop rank=1 at=step:2/forward resume=0.3")
    attempt = run.attempts[0]
    assert (attempt.ending, attempt.exits) == ("completed", {0: 0, 1: 0})
    (strike,) = run.strikes()
    assert attempt.ended_t - strike.t >= 0.3


@pytest.mark.parametrize(
    ("action", "where"),
    [
        ("garble", "in the step"),  # it cannot make ranks wait
        ("garble", "after it"),
        ("wrong-reduction", "after it"),  # it could, but all ranks completed the step
    ],
)
def test_a_pause_after_a_bent_call_that_left_nobody_waiting_is_no_hang(
    supervise_program: SuperviseProgram, action: str, where: str
) -> None:
    fault = f"{action} rank=1 at=step:2/collective/all_reduce"
    run = supervise_program("pauses", fault, stopped_silence_s=0.5, where=where)
    assert run.attempts[0].ending == "completed"
    assert [record["unable"] for record in run.trace(1, 1) if record["kind"] == "bent"] == [""]


@pytest.mark.parametrize("action", ["drop", "skip", "duplicate", "wrong-shape"])
def test_ranks_that_a_bent_call_left_waiting_are_not_waited_for_as_long(
    supervise_program: SuperviseProgram, action: str
) -> None:
    fault = f"{action} rank=1 at=step:3/collective/all_reduce"
    run = supervise_program("pauses", fault, silence_s=3600.0, stopped_silence_s=1.0, where="")
    assert run.attempts[0].ending != "completed"


def test_a_job_that_hangs_by_itself_is_ended_by_the_silence_limit(
    supervise_program: SuperviseProgram,
) -> None:
    run = supervise_program("hang", silence_s=1.0)
    assert run.attempts[0].ending == "hung"
    assert run.strikes() == []


def test_a_terminated_rank_that_ignores_the_signal_is_killed_when_the_grace_is_over(
    supervise_program: SuperviseProgram,
) -> None:
    run = supervise_program("ignore_sigterm", "terminate rank=1 at=step:1/backward grace=0.5")
    attempt = run.attempts[0]
    assert attempt.exits[1] == -signal.SIGKILL
    (strike,) = run.strikes()
    assert attempt.ended_t - strike.t >= 0.5


def test_a_terminated_rank_that_obeys_ends_by_the_signal(
    supervise_program: SuperviseProgram,
) -> None:
    run = supervise_program("obey_sigterm", "terminate rank=1 at=step:1/backward grace=60")
    assert run.attempts[0].exits[1] == -signal.SIGTERM


def test_ranks_that_leave_as_preempted_are_all_waited_for(
    supervise_program: SuperviseProgram,
) -> None:
    run = supervise_program("train", f"exit rank=* at=exit code={PREEMPTED}")
    attempt = run.attempts[0]
    assert (attempt.ending, attempt.exits) == ("failed", {0: PREEMPTED, 1: PREEMPTED})
    assert "preempted" in attempt.cause


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ({"how": "raise"}, "left with exit code 1: ValueError: no such word: 'quux'"),
        ({"how": "code", "code": 9}, "left with exit code 9"),
        ({"how": "signal"}, "was killed by SIGUSR1"),
        ({"how": "sys.exit"}, "left with exit code 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["how"],
)
def test_a_job_that_fails_by_itself_is_reported_with_rank_and_cause(
    supervise_program: SuperviseProgram, arguments: dict[str, object], cause: str
) -> None:
    attempt = supervise_program("fail", rank=1, **arguments).attempts[0]
    assert attempt.culprit == 1
    assert attempt.cause == f"rank 1 {cause}"


class _HearsLate:
    """A launcher whose rank 1 has begun to leave, and is heard of a while after rank 0."""

    def launch(self, plan: AttemptPlan) -> None:
        self._leaving = os.fork()
        if self._leaving == 0:
            os._exit(9)
        os.waitid(os.P_PID, self._leaving, os.WEXITED | os.WNOWAIT)
        directory = Path(plan.directory)
        directory.mkdir(parents=True, exist_ok=True)
        pid_file(directory, 1).write_text(str(self._leaving))
        plan.trace_file(0).parent.mkdir(exist_ok=True)
        trace = TraceWriter(plan.trace_file(0))
        trace.record("error", type="RuntimeError", message="the peer is gone")
        trace.close()
        self._heard = [[RankExit(0, 1, 1.0)], [], [], [RankExit(1, 9, 2.0)]]

    def exits(self, *, timeout_s: float) -> list[RankExit]:
        return self._heard.pop(0) if self._heard else []

    def signal(self, rank: int, number: int) -> None: ...

    def processes(self) -> list[int]:
        return []

    def stop(self) -> list[str]:
        os.waitpid(self._leaving, 0)
        return []


def test_a_rank_that_was_leaving_before_its_peer_failed_is_the_culprit(
    supervise_program: SuperviseProgram,
) -> None:
    attempt = supervise_program("fail", by=_HearsLate()).attempts[0]
    assert (attempt.culprit, attempt.cause) == (1, "rank 1 left with exit code 9")


def test_the_culprits_last_output_is_kept_in_the_attempt(
    supervise_program: SuperviseProgram,
) -> None:
    attempt = supervise_program("fail", rank=1, how="raise").attempts[0]
    assert "rank 1 was here" in attempt.output
    assert attempt.output.splitlines()[-1] == "ValueError: no such word: 'quux'"
    assert "rank 0 was here" not in attempt.output


def test_what_a_rank_printed_before_it_was_killed_is_there(
    supervise_program: SuperviseProgram,
) -> None:
    attempt = supervise_program("fail", rank=1, how="kill").attempts[0]
    assert (attempt.culprit, attempt.output) == (1, "rank 1 was here")


def test_every_rank_of_every_attempt_has_an_output_file_of_its_own(
    supervise_program: SuperviseProgram,
) -> None:
    run = supervise_program("fail", rank=0, how="raise", max_restarts=1)
    for attempt in (1, 2):
        for rank in (0, 1):
            text = (run.directory / f"attempt{attempt}" / f"rank{rank}.log").read_text()
            assert text.count(f"rank {rank} was here") == 1
            assert f"rank {1 - rank} was here" not in text


def test_the_world_is_restarted_as_often_as_allowed_and_no_more(
    supervise_program: SuperviseProgram,
) -> None:
    run = supervise_program("train", "kill rank=1 at=step:2 persistent=yes", max_restarts=2)
    assert [attempt.number for attempt in run.attempts] == [1, 2, 3]
    assert not run.completed


def test_a_fault_that_struck_once_does_not_strike_after_the_restart(
    supervise_program: SuperviseProgram,
) -> None:
    run = supervise_program("train", "kill rank=1 at=step:2", max_restarts=2)
    assert [attempt.ending for attempt in run.attempts] == ["failed", "completed"]
    assert len(run.strikes()) == 1


def test_faults_may_strike_at_the_start_and_at_the_exit_of_a_process(
    supervise_program: SuperviseProgram,
) -> None:
    run = supervise_program(
        "train", "kill rank=1 at=start; kill rank=0 at=exit when=after attempt=2", max_restarts=2
    )
    assert [attempt.ending for attempt in run.attempts] == ["failed", "failed", "completed"]
    assert run.attempts[1].exits[0] == -signal.SIGKILL


def test_a_run_is_read_back_from_its_directory_as_it_was(
    supervise_program: SuperviseProgram,
) -> None:
    run = supervise_program("train", "kill rank=1 at=step:2", max_restarts=1)
    assert load_run(run.directory) == run


@pytest.mark.parametrize("how", ["raise", "sys.exit"])
def test_the_rank_that_failed_first_is_blamed_though_it_leaves_last(
    supervise_program: SuperviseProgram, how: str
) -> None:
    attempt = supervise_program("fail", rank=1, how=how, leaving_s=0.5).attempts[0]
    assert set(attempt.exits) == {0, 1}
    assert attempt.culprit == 1
