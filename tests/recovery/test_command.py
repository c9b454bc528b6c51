"""`python -m seatrial.recovery` does what docs/store-command.md shows, and says what it refuses."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from seatrial.recovery import CheckpointStore, inspect_store
from seatrial.recovery import __main__ as command
from seatrial.recovery.files import file_problems
from seatrial.recovery.storage.local_files import LocalFiles

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "store-command.md"


@pytest.fixture
def store(tmp_path: Path, make_state: Any, monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    """Steps 10 to 40 in ``checkpoints``, a bit of step 30 flipped."""
    monkeypatch.chdir(tmp_path)
    store = CheckpointStore("checkpoints", keep_last=9, topology="dp1")
    state = make_state(1)
    state.live, state.shared, state.own = {"weight": torch.arange(40.0)}, {}, {}
    for step in (10, 20, 30, 40):
        store.save(state, step=step)
    (path,) = Path("checkpoints/step-00000030").glob("attempt-*/*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return store


@pytest.fixture
def run(store: CheckpointStore, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """``run("list", ...)``: exit status and output; the directory is put in."""

    def run(name: str, *arguments: str) -> tuple[int, str]:
        status = command.main([name, "checkpoints", *arguments])
        return status, capsys.readouterr().out

    return run


def examples() -> list[tuple[str, str]]:
    (block,) = re.findall(r"^```console\n(.*?)^```$", DOCUMENT.read_text(), re.M | re.S)
    pairs = [part.split("\n", 1) for part in re.split(r"^\$ ", block, flags=re.M)[1:]]
    return [(line, output) for line, output in pairs]


@pytest.mark.usefixtures("store")
def test_the_document_s_examples_print_what_it_shows() -> None:
    for line, expected in examples():
        python, *words = shlex.split(line)
        assert python == "python"
        done = subprocess.run(
            [sys.executable, "-W", "error", *words], capture_output=True, text=True, check=False
        )
        found = re.sub(r"attempt-[0-9a-f]+", "attempt-…", done.stdout)
        assert (found, done.stderr) == (expected, ""), line
        assert done.returncode == (1 if "damaged" in expected else 0), line
    report = inspect_store("checkpoints")
    assert [step.step for step in report.steps] == [20, 40]


def test_torch_is_not_imported() -> None:
    code = "import sys, seatrial.recovery.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_verifying_all_finds_the_damaged_one_and_notes_the_whole_ones(
    run: Callable[..., Any], store: CheckpointStore
) -> None:
    status, out = run("verify", "--json")
    assert status == 1
    rows = json.loads(out)["steps"]
    assert [(row["step"], row["verified"]) for row in rows] == [
        (10, True),
        (20, True),
        (30, False),
        (40, True),
    ]
    assert "rank-00000.safetensors" in rows[2]["problems"][0]
    assert [info.verified for info in store.list()] == [True, True, False, True]
    assert run("verify", "40")[0] == 0


def test_a_damaged_manifest_is_listed_as_damage(run: Callable[..., Any]) -> None:
    Path("checkpoints/step-00000020/manifest.json").write_text("{}")
    status, out = run("list")
    assert status == 1
    assert "step 20: damaged\n  the manifest is not whole" in out
    assert run("verify", "20")[0] == 1


def test_leftovers_and_quarantine_are_listed(run: Callable[..., Any]) -> None:
    Path("checkpoints/step-00000050/attempt-dead").mkdir(parents=True)
    Path("checkpoints/quarantine/step-00000005-1").mkdir(parents=True)
    out = run("list")[1]
    assert "leftover: step-00000050\n" in out
    assert "quarantined: step-00000005-1\n" in out
    assert json.loads(run("list", "--json")[1])["leftovers"] == ["step-00000050"]


def test_a_dry_run_writes_nothing_and_says_what_a_real_one_deletes(run: Callable[..., Any]) -> None:
    before = sorted(map(str, Path("checkpoints").rglob("*")))
    status, out = run("prune", "--keep-last", "1", "--dry-run", "--json")
    assert sorted(map(str, Path("checkpoints").rglob("*"))) == before
    assert status == 0
    assert json.loads(out) == {
        "dry_run": True,
        "deleted": ["step-00000030", "step-00000020", "step-00000010"],
    }
    assert json.loads(run("prune", "--keep-last", "1", "--json")[1])["deleted"] == [
        "step-00000030",
        "step-00000020",
        "step-00000010",
    ]
    assert run("prune", "--keep-last", "1")[1] == "nothing to delete\n"


def test_pruning_never_deletes_the_last_good_one(run: Callable[..., Any]) -> None:
    for path in Path("checkpoints/step-00000040").glob("attempt-*/*.json"):
        path.unlink()
    out = run("prune", "--keep-last", "1")[1]
    assert out == "deleted: step-00000030\ndeleted: step-00000010\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["verify", "checkpoints", "7"], "step 7 is not published; published are [10, 20"),
        (["list", "elsewhere"], "elsewhere is no directory"),
        (["verify", "."], "so nothing was verified"),
        (["prune", "checkpoints", "--keep-last", "0"], "keep_last is 0"),
        (["prune", "checkpoints", "--keep-last", "1", "--keep-every", "0"], "keep_every is 0"),
    ],
)
def test_what_cannot_be_carried_out_is_status_2(
    store: CheckpointStore, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    assert command.main(arguments) == 2
    assert text in capsys.readouterr().err
    assert len(store.list()) == 4


@pytest.mark.parametrize("arguments", [[], ["list"], ["prune", "checkpoints"], ["mend", "x"]])
def test_a_wrong_command_line_is_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(arguments)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_a_long_verification_shows_progress_on_a_terminal_alone(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr(command, "PROGRESS_BYTES_MIN", 1)
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    status, out = run("verify", "40", "--json")
    assert status == 0
    assert json.loads(out)["steps"][0]["verified"]
    if terminal:
        assert "%" in stream.getvalue()
        assert stream.getvalue().endswith("\r")
    else:
        assert stream.getvalue() == ""


@pytest.mark.usefixtures("store")
def test_progress_adds_up_to_all_bytes_but_the_headers() -> None:
    reader = CheckpointStore("checkpoints")
    manifest = reader._directory.read_manifest(40).manifest
    done: list[int] = []
    attempt = reader.directory / "step-00000040" / manifest.attempt
    assert file_problems(LocalFiles(attempt), manifest, progress=done.append) == []
    headers = sum(shard.header for shard in manifest.shards)
    assert sum(done) == manifest.size_bytes - headers


# keep_every


def test_steps_that_keep_every_divides_stay_for_good(tmp_path: Path, make_state: Any) -> None:
    store = CheckpointStore(tmp_path, keep_last=2, keep_every=4)
    for step in range(1, 12):
        store.save(make_state(1), step=step)
        if step == 1:
            store.verify(1)
    # 1 is the only one that is known to be good.
    assert [info.step for info in store.list()] == [1, 4, 8, 10, 11]
    store.verify(11)
    store.save(make_state(1), step=13)
    assert [info.step for info in store.list()] == [4, 8, 11, 13]


@pytest.mark.parametrize("keep_every", [0, -1])
def test_keep_every_is_a_number_of_steps(tmp_path: Path, keep_every: int) -> None:
    with pytest.raises(ValueError, match="keep_every"):
        CheckpointStore(tmp_path, keep_every=keep_every)
    assert os.listdir(tmp_path) == []
