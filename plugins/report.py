"""Whether a trial ended as it must, and the text that says why not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from seatrial.chaos.session import Trial
from seatrial.chaos.verdict import Verdict

from .preflight import PlannedTrial


def problem_with(planned: PlannedTrial, trial: Trial, expect: Verdict | None) -> str:
    """Why the trial fails its test, in a sentence; empty if it passes."""
    judgement = trial.judgement
    if planned.omit:
        return _control_problem(planned.omit, trial)
    if trial.verdict is Verdict.NOT_EXERCISED or expect not in (None, trial.verdict):
        wanted = f" instead of {expect}" if expect not in (None, trial.verdict) else ""
        return f"{trial.verdict}{wanted}: {judgement.reason}"
    if planned.lossless and judgement.steps_lost:
        return (
            f"{judgement.steps_lost} step(s) were lost, though SIGTERM left the time to save: the "
            "job did not save when it was told to leave"
        )
    return ""


def _control_problem(component: str, trial: Trial) -> str:
    judgement = trial.judgement
    if trial.verdict is Verdict.DIVERGED and judgement.component == component:
        return ""
    if trial.verdict is Verdict.RECOVERED:
        return (
            f"blind spot: a restore without the {component} was not noticed. Either the run is too "
            "short for it to matter, or the job does not use it"
        )
    blamed = f" in {judgement.component}" if judgement.component else ""
    return (
        f"a restore without the {component} must be called DIVERGED in {component}, "
        f"not {trial.verdict}{blamed}: {judgement.reason}"
    )


def _some(lost: Sequence[str], most: int = 8) -> list[str]:
    shown = list(lost[:most]) or ["everything as it was"]
    return shown + [f"and {len(lost) - most} more"] * (len(lost) > most)


def failure_report(
    planned: PlannedTrial, trial: Trial, problem: str, *, replay: str, kept: Path | None
) -> str:
    """What a failed trial shows: the problem, what happened, the culprit's output, the replay."""
    lines = [problem, "", f"fault:    {planned.schedule}"]
    for attempt in trial.run.attempts:
        cause = f", {attempt.cause}" if attempt.cause else ""
        lines.append(f"attempt {attempt.number}: {attempt.ending}{cause}")
        if attempt.store.lost is not None:
            lines += [f"    the power loss left: {what}" for what in _some(attempt.store.lost)]
        lines += [f"    {line}" for line in (*attempt.calls, *attempt.stacks)]
    lines += [f"note:     {note}" for note in trial.judgement.notes]
    last = next((each for each in reversed(trial.run.attempts) if each.output), None)
    if last is not None:
        whose = "the launcher" if last.culprit is None else f"rank {last.culprit}"
        lines += ["", f"last output of {whose} in attempt {last.number}:"]
        lines += [f"    {line}" for line in last.output.splitlines()]
    lines += ["", f"replay:   {replay}"]
    lines += [f"kept:     {kept}"] if kept else []
    return "\n".join(lines)
