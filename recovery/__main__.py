"""``python -m seatrial.recovery``: list, verify and prune a store from the command line.

Guarantees: `list` and `verify` write nothing but the note that a step was verified; `prune` deletes
by the rule of `seatrial.recovery.retention`, and with ``--dry-run`` writes nothing at all. Exit
status 0 if all is well, 1 if something is damaged, 2 if the command cannot be carried out. torch is
not imported.

Does not: repair, move to quarantine, or know whether a run is saving: do not prune while one does.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from . import retention
from .directory import CheckpointDirectory
from .errors import CheckpointError
from .files import file_problems
from .storage import is_url
from .storage.names import step_name
from .storage.options import parse_options, resolved_options
from .storage.secret import refuse_secret_url
from .workers import reader_threads

OK, DAMAGED, USAGE = 0, 1, 2

PROGRESS_BYTES_MIN = 1 << 30
"""What is verified sooner than anybody would look needs no progress bar."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published step, as `list` and `verify` print it."""

    step: int
    size_bytes: int | None
    world_size: int | None
    topology: str | None
    verified: bool
    problems: tuple[str, ...] = ()


class Bar:
    """A line on standard error, if that is a terminal and ``total`` is large."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._shown = total >= PROGRESS_BYTES_MIN and sys.stderr.isatty()

    def add(self, size_bytes: int) -> None:
        before, self._done = self._done, self._done + size_bytes
        percent = 100 * self._done // self._total
        if self._shown and percent != 100 * before // self._total:
            cells = "#" * (percent // 4)
            print(f"\r[{cells:25}] {percent:3}%", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._shown:
            print(f"\r{'':32}\r", end="", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out one command; the exit status."""
    options = _parser().parse_args(arguments)
    run: Callable[[CheckpointDirectory, argparse.Namespace], int] = options.run
    try:
        refuse_secret_url(options.directory)
        given = resolved_options(parse_options(options.option)) if options.option else None
        if given and not is_url(options.directory):
            return _refuse(f"--option is for URLs, and {options.directory!r} is a directory")
        directory = CheckpointDirectory.at(options.directory, storage_options=given)
        if not directory.storage.exists():
            return _refuse(
                f"{directory.location} is no directory; give the directory of the checkpoints"
            )
        return run(directory, options)
    except (OSError, CheckpointError) as error:
        return _refuse(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m seatrial.recovery",
        description="List, verify and prune a directory of checkpoints.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[..., int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("directory", help="or URL of the checkpoints of one run")
        command.add_argument(
            "--option",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="of the URL's storage, such as endpoint_url=https://… (repeatable); a secret as "
            "KEY=env:VARIABLE",
        )
        command.add_argument("--json", action="store_true", help="print one JSON object")
        command.set_defaults(run=run)
        return command

    add("list", _list, "The published steps; only their manifests are read.")
    verify = add("verify", _verify, "Check every digest of one step, or of all.")
    verify.add_argument("step", type=int, nargs="?", help="all if left out")
    prune = add("prune", _prune, "Delete leftovers and steps that are not needed.")
    prune.add_argument("--keep-last", type=int, required=True, metavar="N", help="1 or more")
    prune.add_argument("--keep-every", type=int, metavar="N", help="keep steps that N divides")
    prune.add_argument("--dry-run", action="store_true", help="say what would be deleted")
    return parser


def _list(directory: CheckpointDirectory, options: argparse.Namespace) -> int:
    rows = [_row(directory, step) for step in directory.storage.published()]
    leftovers = directory.storage.leftovers()
    quarantined = directory.storage.quarantined()
    if options.json:
        _print_json(
            steps=[asdict(row) for row in rows], leftovers=leftovers, quarantined=quarantined
        )
    else:
        _print_rows(rows)
        for title, names in (("leftover", leftovers), ("quarantined", quarantined)):
            for name in names:
                print(f"{title}: {name}")
    return _status(rows)


def _verify(directory: CheckpointDirectory, options: argparse.Namespace) -> int:
    published = directory.storage.published()
    if options.step is not None and options.step not in published:
        return _refuse(f"step {options.step} is not published; published are {published}")
    steps = published if options.step is None else [options.step]
    if not steps:
        return _refuse(f"nothing is published in {directory.location}, so nothing was verified")
    rows = [_row(directory, step) for step in steps]
    bar = Bar(sum(row.size_bytes or 0 for row in rows))
    try:
        rows = [row if row.problems else _verified(directory, row, bar) for row in rows]
    finally:
        bar.close()
    if options.json:
        _print_json(steps=[asdict(row) for row in rows])
    else:
        _print_rows(rows)
    return _status(rows)


def _verified(directory: CheckpointDirectory, row: Row, bar: Bar) -> Row:
    manifest = directory.read_manifest(row.step).manifest
    problems = tuple(
        file_problems(
            directory.files(manifest),
            manifest,
            progress=bar.add,
            threads=reader_threads(alone=True),
        )
    )
    if not problems:
        try:
            directory.mark_verified(row.step, manifest.attempt)
        except OSError as error:  # a snapshot that may not be written can be verified as well
            said = f"it could not be noted that step {row.step} is verified: {error}"
            print(f"python -m seatrial.recovery: {said}", file=sys.stderr)
    return Row(**{**vars(row), "verified": not problems, "problems": problems})


def _prune(directory: CheckpointDirectory, options: argparse.Namespace) -> int:
    rule = {"keep_last": options.keep_last, "keep_every": options.keep_every}
    try:
        retention.check_rule(**rule)
    except ValueError as error:
        return _refuse(str(error))
    if options.dry_run:
        found = retention.unneeded(directory, **rule, record=False)
        deleted: Sequence[str] = [*found.leftovers, *map(step_name, found.steps)]
    else:
        deleted = retention.collect(directory, **rule)
    rows = [_row(directory, step) for step in directory.storage.published()]
    if options.json:
        _print_json(dry_run=options.dry_run, deleted=deleted)
    else:
        for name in deleted:
            print(f"{'would delete' if options.dry_run else 'deleted'}: {name}")
        if not deleted:
            print("nothing to delete")
    return _status(rows)


def _row(directory: CheckpointDirectory, step: int) -> Row:
    try:
        manifest = directory.read_manifest(step).manifest
    except (CheckpointError, OSError) as error:
        return Row(
            step=step,
            size_bytes=None,
            world_size=None,
            topology=None,
            verified=False,
            problems=(str(error),),
        )
    return Row(
        step=step,
        size_bytes=manifest.size_bytes,
        world_size=manifest.world_size,
        topology=manifest.topology,
        verified=directory.verified_attempt(step) == manifest.attempt,
    )


def _print_rows(rows: Sequence[Row]) -> None:
    for row in rows:
        if row.problems:
            print(f"step {row.step}: damaged")
            for problem in row.problems:
                print(f"  {problem}")
        else:
            ranks = f"{row.world_size} rank{'' if row.world_size == 1 else 's'}"
            shape = f"{ranks} {row.topology}" if row.topology else ranks
            state = "verified" if row.verified else "not verified"
            print(f"step {row.step}: {row.size_bytes} bytes, {shape}, {state}")
    if not rows:
        print("nothing is published")


def _print_json(**fields: object) -> None:
    print(json.dumps(fields, indent=2))


def _status(rows: Sequence[Row]) -> int:
    return DAMAGED if any(row.problems for row in rows) else OK


def _refuse(text: str) -> int:
    print(f"python -m seatrial.recovery: {text}", file=sys.stderr)
    return USAGE


if __name__ == "__main__":
    sys.exit(main())
