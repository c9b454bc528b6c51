"""The table of ``--chaos-*`` options and their ini twins; read by pytest at every start.

Light on purpose: it imports nothing of seatrial. `seatrial.plugins.options` gives values meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError
    return value


@dataclass(frozen=True)
class Option:
    """One option: how it is spelled, read and explained."""

    name: str
    metavar: str
    help: str
    read: Callable[[str], Any] = str
    expects: str = "text"
    repeatable: bool = False
    has_ini: bool = True

    @property
    def flag(self) -> str:
        return "--chaos-" + self.name.replace("_", "-")

    @property
    def ini(self) -> str:
        """Its name in pytest's configuration, and its ``dest``."""
        return "chaos_" + self.name


_COUNT: tuple[Any, str] = (_count, "a whole number from 1")

OPTIONS = (
    Option("job", "JOB", "job on trial: gpt, module:Class or file.py:Class"),
    Option("param", "KEY=VALUE", "option of the job (repeatable)", repeatable=True),
    Option("text", "FILE", "text that the bundled job trains on (default: CPython's manual)"),
    Option("ranks", "N", "number of ranks (2)", *_COUNT),
    Option("nodes", "N", "simulated nodes that the ranks are spread over (1)", *_COUNT),
    Option("topology", "T", "such as dp2, fsdp4, hsdp2x2, zero1-dp2 or dp2-tp2-pp2 (default: dp "
            "over all ranks)"),
    Option("reshard", "T,T", "topologies to restart on, such as dp4,dp2-tp2; dp2:dp4 one by one"),
    Option("device", "D", "auto, cpu or cuda (auto)"),
    Option("store", "PLACE", "directory or URL of the checkpoint stores (a temporary directory)"),
    Option("store_option", "KEY=VALUE", "of the storage at a URL, such as endpoint_url=URL "
            "(repeatable); secrets as KEY=env:VARIABLE", repeatable=True),
    Option("disk", "DISK", "put the stores on a disk that sees every operation of every program, "
            "fuse, for faults of the storage"),
    Option("powerloss", "DISK", "put the stores on a disk that can lose power, fuse, ext4 or xfs, "
            "and cut it"),
    Option("steps", "N", "optimizer steps of a run (14)", *_COUNT),
    Option("checkpoint_interval", "N", "steps between checkpoints (5)", *_COUNT),
    Option("seed", "N", "seed of job and faults (0)", _natural, "a whole number from 0"),
    Option("fault", "SCHEDULE", "run this trial, not the bundled ones (repeatable)",
            repeatable=True),
    Option("timeout", "S", "seconds without any event after which an attempt counts as hung "
            "(default: from the reference's own pace)", _seconds, "a number of seconds above 0"),
    Option("run_limit", "S", "seconds that a run may take with all its attempts (3600)", _seconds,
            "a number of seconds above 0"),
    Option("launcher", "L", "fork, spawn, torchrun, or hosts: torchrun on each node, with a "
            "network between them (fork)"),
    Option("max_restarts", "N", "restarts of the world in one run (3)", _natural,
            "a whole number from 0"),
    Option("artifacts", "DIR", "keep traces and rank output of failed trials here"),
    Option("certify", "PLACE", "certify a directory or URL as a place for checkpoints, and nothing "
            "else", has_ini=False),
)  # fmt: skip


def add_options(parser: pytest.Parser) -> None:
    """Declare every option and its ini twin.

    Raises:
        ValueError: another plugin owns one of the names.
    """
    group = parser.getgroup("chaos", "break a multi-rank job and prove its recovery")
    group.addoption(
        "--chaos", action="store_true", help="run the pre-flight and tests that use chaos_trial"
    )
    for option in OPTIONS:
        group.addoption(
            option.flag,
            dest=option.ini,
            metavar=option.metavar,
            default=None,
            help=option.help,
            action="append" if option.repeatable else "store",
        )
        if not option.has_ini:
            continue
        kind: Any = "linelist" if option.repeatable else "string"
        parser.addini(option.ini, option.help, type=kind, default=None)
