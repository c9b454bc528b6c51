"""The documents say what the code does: tables, flags, faults, links and examples.

Does not: check prose, or the excerpts of output.
"""

from __future__ import annotations

import ast
import configparser
import errno
import re
import shlex
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest

from seatrial.chaos.actions import ACTIONS, ERRORS, EVERY_OPERATION
from seatrial.chaos.case import Verdict
from seatrial.chaos.certify import GUARANTEES
from seatrial.chaos.events import EVENTS
from seatrial.chaos.powerloss import KINDS
from seatrial.chaos.powerloss.volatile import SURVIVES
from seatrial.chaos.proxy.rule import HTTP_ACTIONS
from seatrial.chaos.schedule import Schedule, Shape, require_possible
from seatrial.plugins.jobs.gpt_config import GPTConfig
from seatrial.plugins.option_table import OPTIONS
from seatrial.recovery.storage import s3_client, s3_upload
from seatrial.recovery.storage.retry import LOCAL, REMOTE, TRANSIENT

from .conftest import run_python
from .documents import DOCUMENTS, ROOT, Block, all_blocks, anchors, blocks, links, table

README = ROOT / "README.md"
STORAGE = ROOT / "docs" / "storage.md"
FAULTS = ROOT / "docs" / "faults.md"
STORAGE_FAULTS = ROOT / "docs" / "storage-faults.md"
CERTIFICATES = ROOT / "docs" / "certificates.md"
FLAGS = {"--chaos", *(option.flag for option in OPTIONS)}

in_each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


@pytest.mark.parametrize("document", [README, FAULTS], ids=lambda path: path.name)
def test_the_table_of_actions_is_the_code_s(document: Path) -> None:
    assert table(document, "actions") == [
        [
            f"`{action.name}`",
            action.meaning,
            ", ".join(f"`{option}=`" for option in action.options) or "-",
        ]
        for action in ACTIONS.values()
    ]


@pytest.mark.parametrize("document", [README, FAULTS], ids=lambda path: path.name)
def test_the_table_of_events_is_the_code_s(document: Path) -> None:
    shown = [event for event in EVENTS if document is FAULTS or event.stage != "collective"]
    assert table(document, "events") == [
        [
            f"`{event.name}`",
            event.stage,
            event.meaning,
            ("rank 0" if event.coordinator_only else "every rank")
            + (", directories only" if event.directory_only else ""),
        ]
        for event in shown
    ]


def test_the_events_that_only_directories_have_are_the_code_s() -> None:
    assert [row[0] for row in table(STORAGE, "directory-only")] == [
        f"`{event.name}`" for event in EVENTS if event.directory_only
    ]


def test_the_table_of_disks_is_the_code_s() -> None:
    document = ROOT / "docs" / "power-loss.md"
    assert table(document, "powerloss") == [[f"`{kind}`", what] for kind, what in KINDS.items()]
    assert [row[0] for row in table(document, "survives")] == [f"`{each}`" for each in SURVIVES]


def test_the_table_of_alterations_is_the_code_s() -> None:
    every = ["everything"]
    assert [[row[0], row[2].split(", ")] for row in table(STORAGE_FAULTS, "operations")] == [
        [f"`{name}`", every if action.operations == EVERY_OPERATION else list(action.operations)]
        for name, action in ACTIONS.items()
        if action.operations
    ]
    text = " ".join(STORAGE_FAULTS.read_text().split())
    *names, last = ERRORS
    assert f"`error=` is one of {', '.join(names)}, or {last}" in text


def test_the_table_of_the_disk_has_all_operations() -> None:
    assert [row[0] for row in table(STORAGE_FAULTS, "disk")] == [
        f"`{event.name}`" for event in EVENTS if event.stage == "storage"
    ]


def test_the_table_of_faults_of_requests_is_the_code_s() -> None:
    assert table(STORAGE_FAULTS, "requests") == [
        [f"`{name}`", meaning] for name, meaning in HTTP_ACTIONS.items()
    ]


def test_the_table_of_guarantees_is_the_code_s() -> None:
    assert [row[:2] for row in table(CERTIFICATES, "guarantees")] == [
        [each.name, "yes" if each.needed else "no"] for each in GUARANTEES
    ]


def test_the_table_of_transient_errors_is_the_code_s() -> None:
    rows = table(STORAGE, "transient")
    named = {getattr(errno, name) for row in rows for name in re.findall(r"`(E[A-Z]+)`", row[0])}
    assert named == TRANSIENT


def test_the_bounds_of_trying_again_are_the_code_s() -> None:
    text = STORAGE.read_text()
    assert f"| no new try after | {LOCAL.total_s:g} s | {REMOTE.total_s:g} s |" in text
    waits = f"{LOCAL.wait_max_s:g} s | {REMOTE.wait_max_s:g} s"
    assert f"| wait between tries, at most | {waits} |" in text
    connect, read = s3_client.CONNECT_TIMEOUT_S, s3_client.READ_TIMEOUT_S
    assert f"{connect} s to connect, {read} s without a byte" in text
    parts = f"{s3_upload.PART_BYTES >> 20} MB, digested on the way, {s3_upload.PARTS_UNDER_WAY}"
    assert f"parts of {parts} under way" in text


def test_the_table_of_options_is_the_code_s() -> None:
    assert table(README, "options") == [
        [
            f"`{option.flag} {option.metavar}`",
            f"`{option.ini}`" if option.has_ini else "-",
            option.help,
        ]
        for option in OPTIONS
    ]


def test_the_table_of_job_options_is_the_code_s() -> None:
    defaults = {field.name: field.default for field in fields(GPTConfig)}
    found = table(ROOT / "docs" / "writing-a-job.md", "gpt")
    assert [row[:2] for row in found] == [
        [f"`{name}`", f"`{default!r}`"] for name, default in defaults.items()
    ]


@pytest.mark.parametrize("verdict", Verdict)
def test_every_verdict_is_explained(verdict: Verdict) -> None:
    assert f"\n## {verdict}\n" in (ROOT / "docs" / "verdicts.md").read_text()
    assert f"\n| `{verdict}` |" in README.read_text()


@in_each_document
def test_every_relative_link_resolves(document: Path) -> None:
    for link in links(document):
        if "://" in link:
            continue
        path, _, fragment = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        assert not fragment or fragment in anchors(target), link


@in_each_document
def test_every_flag_exists(document: Path) -> None:
    # A prefix that stands for all flags, such as `--chaos-*`, ends in a hyphen.
    mentioned = re.findall(r"--chaos[\w-]*", document.read_text())
    assert {flag for flag in mentioned if not flag.endswith("-")} <= FLAGS


@in_each_document
def test_every_schedule_can_fire(document: Path) -> None:
    for block in blocks(document, "sh", "text"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if "--chaos-fault" in line else []
            given = dict(pairwise(words))
            ranks = int(given.get("--chaos-ranks", 2))
            shape = Shape(
                world_size=ranks,
                ranks_per_node=ranks // int(given.get("--chaos-nodes", 1)),
                steps=14,
                checkpoint_interval=5,
                hosts=given.get("--chaos-launcher") == "hosts",
            )
            for flag, text in pairwise(words):
                if flag == "--chaos-fault" and text != "…":
                    require_possible(Schedule.parse(text), shape)


@in_each_document
def test_every_ini_setting_exists(document: Path) -> None:
    for block in blocks(document, "ini"):
        parser = configparser.ConfigParser()
        parser.read_string(block.text)
        assert set(parser["pytest"]) <= {option.ini for option in OPTIONS if option.has_ini}


@in_each_document
def test_every_script_exists(document: Path) -> None:
    for script in re.findall(r"(?<![\w/])(?:\./)?(ci/[\w/]+)(?![\w/.])", document.read_text()):
        assert (ROOT / script).exists(), script


@pytest.mark.parametrize(
    "block", all_blocks("python"), ids=lambda block: block.mark or block.document
)
def test_every_example_is_python(block: Block) -> None:
    ast.parse(block.text)


def test_the_example_tests_pass_on_the_example_job(example_files: Path) -> None:
    names = sorted(path.name for path in example_files.glob("test_*.py"))
    options = ["-W", "error", "-p", "no:cacheprovider", "-p", "no:xdist"]
    result = run_python(example_files, "-m", "pytest", "--chaos", *options, *names)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "RECOVERED" in result.stdout
    assert "STOPPED" in result.stdout


def test_without_chaos_the_example_tests_are_skipped(example_files: Path) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    result = run_python(example_files, "-m", "pytest", *options, "test_train.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"^\d+ skipped", result.stdout, re.M)


@pytest.mark.parametrize(
    "block",
    [block for block in all_blocks("python") if block.mark == "run"],
    ids=lambda block: block.document,
)
def test_every_example_script_runs(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(block.text)
    result = run_python(tmp_path, "-W", "error", str(script))
    assert result.returncode == 0, result.stderr


def test_no_document_names_the_interpreter_s_own_path() -> None:
    for document in DOCUMENTS:
        assert sys.prefix not in document.read_text()
