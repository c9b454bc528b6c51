"""The ``--chaos-*`` options as one checked value, and the experiment that they describe.

`read_options` guarantees that whatever it returns can be run: everything that can be known to be
wrong without starting a process is a `UsageError` of one sentence. Torch-free.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

from seatrial.chaos.errors import UsageError
from seatrial.chaos.experiment import Experiment
from seatrial.chaos.handover import Handover
from seatrial.chaos.launch.launcher import HOSTS, METHODS
from seatrial.chaos.launch.plan import Workload, World
from seatrial.chaos.network.available import require_hosts
from seatrial.chaos.powerloss import check_kind
from seatrial.chaos.route import Route
from seatrial.recovery.errors import RecoveryError
from seatrial.recovery.publish import probe_publish
from seatrial.recovery.storage import is_url, open_storage
from seatrial.recovery.storage.options import offered, parse_options
from seatrial.recovery.storage.secret import refuse_secret_url
from seatrial.recovery.topology import Topology

from .jobs.registry import check_bundled, check_job_name, preload_modules, resolve_job
from .option_table import OPTIONS, Option


@dataclass(frozen=True, kw_only=True)
class ChaosOptions:
    """What the user asked for; the fields are the options without their ``--chaos-`` prefix."""

    job: str = "gpt"
    param: tuple[str, ...] = ()
    text: str = ""
    ranks: int = 2
    nodes: int = 1
    topology: str = ""
    reshard: str = ""
    device: str = "auto"
    store: str = ""
    store_option: tuple[str, ...] = ()
    disk: str = ""
    powerloss: str = ""
    steps: int = 14
    checkpoint_interval: int = 5
    seed: int = 0
    fault: tuple[str, ...] = ()
    timeout: float | None = None
    run_limit: float = 3600.0
    launcher: str = "fork"
    max_restarts: int = 3
    artifacts: str = ""
    certify: str = ""


_OF_THE_SESSION = ("fault", "store", "store_option", "disk", "powerloss", "artifacts", "certify")
"""Options that no single test can change."""


def read_options(config: pytest.Config) -> ChaosOptions:
    """The options in force: the command line first, then the ini file, then the defaults.

    Raises:
        UsageError: a value that cannot be used.
    """
    values: dict[str, Any] = {}
    for option in OPTIONS:
        given = config.getoption(option.ini) or None
        if option.name == "store" and config.getoption(option.ini) == "":
            # Not the temporary directory: what was meant would not have been on trial.
            raise UsageError(f"{option.flag} names no place (is a variable not set?)")
        if given is None and option.has_ini:
            given = config.getini(option.ini) or None
        if given is not None:
            values[option.name] = _read(option, given)
    options = ChaosOptions(**values)
    places = (config.invocation_params.dir, config.rootpath)
    options = replace(options, job=resolve_job(options.job, places))
    _check(options)
    if options.store_option:
        # In the environment: the ranks, and the jobs in them, open the stores that they are given.
        offering = contextlib.ExitStack()
        offering.enter_context(offered(options.store, store_options(options.store_option)))
        config.add_cleanup(offering.close)
    if options.store and not hasattr(config, "workerinput"):  # once for all xdist workers
        _check_store(options.store)
    if options.artifacts:
        _check_artifacts(Path(options.artifacts))
        options = replace(options, artifacts=str(Path(options.artifacts).absolute()))
    return options


def _read(option: Option, given: str | list[str], *, said: str = "") -> object:
    if option.repeatable:
        return tuple(given)
    try:
        return option.read(str(given))
    except ValueError:
        said = said or f"{option.flag} {given!r}"
        raise UsageError(f"{said} is not {option.expects}") from None


def _read_keyword(name: str, value: object) -> object:
    """An option's value as a test gives it: ``ranks=4`` is what ``--chaos-ranks 4`` is."""
    (option,) = (each for each in OPTIONS if each.name == name)
    if value is None and getattr(ChaosOptions(), name) is None:
        return None
    if option.repeatable:
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise UsageError(f"{name}={value!r} is not a list of {option.metavar}")
        return tuple(str(each) for each in value)
    if value is None or (option.read is str and not isinstance(value, (str, Path))):
        raise UsageError(f"{name}={value!r} is not {option.expects}")
    return _read(option, str(value), said=f"{name}={value!r}")


def override(options: ChaosOptions, changes: Mapping[str, object], *, beside: Path) -> ChaosOptions:
    """The options with some replaced by a marker or a call; ``params`` may be a mapping.

    A job's ``file.py`` is looked for in the directory ``beside``, then where pytest was started.

    Raises:
        UsageError: an unknown name, or values that cannot be used together.
    """
    values = dict(changes)
    params = values.pop("params", None)
    if isinstance(params, Mapping):
        values["param"] = tuple(f"{key}={value}" for key, value in params.items())
    elif params is not None:
        raise UsageError(f"params={params!r} is not a mapping of names to values")
    known = [each.name for each in fields(ChaosOptions) if each.name not in _OF_THE_SESSION]
    for name in values:
        if name not in known:
            raise UsageError(f"unknown option {name!r}; the options are {', '.join(known)}, params")
    values = {name: _read_keyword(name, value) for name, value in values.items()}
    if "ranks" in values and "topology" not in values:
        values["topology"] = ""
    if "job" in values:
        values["job"] = resolve_job(str(values["job"]), (beside, Path.cwd()))
    changed = replace(options, **values)  # type: ignore[arg-type]
    _check(changed)
    return changed


def _check(options: ChaosOptions) -> None:
    if not sys.platform.startswith("linux"):
        raise UsageError(f"seatrial launches ranks on Linux only, not on {sys.platform}")
    _refuse_secrets(options.store)
    check_job_name(options.job)
    if options.launcher not in METHODS:
        raise UsageError(
            f"unknown launcher {options.launcher!r}; choose one of {', '.join(METHODS)}"
        )
    if options.launcher == HOSTS:
        require_hosts(options.nodes)
        if is_url(options.store):
            raise UsageError(
                "--chaos-launcher hosts: its hosts reach only each other, so --chaos-store must be "
                f"a directory, and not {options.store!r}"
            )
    if options.text:
        try:
            with open(options.text, "rb") as file:
                empty = not file.read(1)
        except OSError as error:
            raise UsageError(f"--chaos-text {options.text!r}: {error.strerror}") from None
        if empty:
            raise UsageError(f"--chaos-text {options.text!r} is empty")
    if options.powerloss:
        check_kind(options.powerloss)
    if options.disk:
        check_kind(options.disk, "--chaos-disk")
        if options.powerloss not in ("", options.disk):
            raise UsageError(
                f"what is done on a disk of {options.powerloss} is not observed: leave out "
                "--chaos-disk, or say --chaos-powerloss fuse"
            )
    for name in ("powerloss", "disk"):
        if getattr(options, name) and options.store:
            raise UsageError(f"--chaos-{name} brings its own disk: leave out --chaos-store")
    if options.store_option and not is_url(options.store):
        raise UsageError("--chaos-store-option is for a URL: give one with --chaos-store")
    store_options(options.store_option)
    experiment(options)
    reshard_routes(options)


def store_options(texts: Sequence[str]) -> dict[str, object]:
    """What ``--chaos-store-option`` says; variables are not looked up.

    Raises:
        UsageError: one that cannot be used, such as a secret in the clear.
    """
    try:
        return parse_options(texts)
    except RecoveryError as error:
        raise UsageError(f"--chaos-store-option: {error}") from None


def _refuse_secrets(store: str) -> None:
    """Before anything says where the store is."""
    try:
        refuse_secret_url(store)
    except RecoveryError as error:
        raise UsageError(f"--chaos-store: {error}") from None


def _check_store(store: str) -> None:
    if is_url(store):
        _check_url(store)
        return
    directory = Path(store)
    made = [each for each in (directory, *directory.parents) if not each.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe_publish(directory)
    except (OSError, RecoveryError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"--chaos-store {store!r} cannot be used: {said}") from None
    finally:
        for each in made:
            if each.is_dir():
                with contextlib.suppress(OSError):  # somebody else has begun to use it
                    each.rmdir()


def _check_artifacts(directory: Path) -> None:
    """A trial that fails must not fail for want of a place: its verdict would be lost."""
    parents = (directory.absolute(), *directory.absolute().parents)
    there = next(each for each in parents if each.exists())
    try:
        tempfile.TemporaryDirectory(dir=there).cleanup()
    except OSError as error:
        raise UsageError(
            f"--chaos-artifacts {str(directory)!r} cannot be used: {there}: {error.strerror}"
        ) from None


def _check_url(store: str) -> None:
    if store.startswith("memory:"):
        raise UsageError(f"--chaos-store {store!r}: every rank has a memory of its own")
    if store.startswith(("file:", "local:")):
        raise UsageError(f"--chaos-store {store!r}: give the path of the directory instead")
    try:
        open_storage(store).prove()
    except (OSError, RecoveryError) as error:
        raise UsageError(f"--chaos-store {store!r} cannot be used: {error}") from None


def experiment(options: ChaosOptions) -> Experiment:
    """The experiment that the options describe.

    Raises:
        UsageError: ranks, nodes, topology or device do not fit together, or a bad ``param``.
    """
    params = _params(options)
    try:
        world = World(
            ranks=options.ranks,
            nodes=options.nodes,
            topology=options.topology or f"dp{options.ranks}",
            device=options.device,
        )
    except RecoveryError as error:
        raise UsageError(str(error)) from None
    check_bundled(options.job, params, world.topology)
    return Experiment(
        workload=_workload(options, params),
        world=world,
        seed=options.seed,
        steps=options.steps,
        checkpoint_interval=options.checkpoint_interval,
        max_restarts=options.max_restarts,
        timeout_s=options.timeout,
        run_limit_s=options.run_limit,
        launcher=options.launcher,
        object_store=is_url(options.store),
        powerloss=options.powerloss,
    )


def _params(options: ChaosOptions) -> dict[str, object]:
    params: dict[str, object] = {}
    for each in options.param:
        key, equals, value = each.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"--chaos-param {each!r} is not KEY=VALUE")
        params[key] = value
    if options.text:
        params["text"] = str(Path(options.text).resolve())
    return params


def _workload(options: ChaosOptions, params: dict[str, object]) -> Workload:
    return Workload(
        entry="seatrial.plugins.jobs.loop:run",
        arguments={
            "job": options.job,
            "params": params,
            "steps": options.steps,
            "interval": options.checkpoint_interval,
        },
        preload=(*preload_modules(options.job), *_file_system_of(options.store)),
    )


def reshard_routes(options: ChaosOptions) -> tuple[Route, ...]:
    """The routes that ``reshard`` names, each from the job's own topology; none if it is empty.

    A topology that is the job's own has its nodes; on any other, a node has as many ranks as there,
    if they divide.

    Raises:
        UsageError: what is no topology, one that the job cannot run on, or too few restarts.
    """
    own, found = experiment(options).world, []
    for text in filter(None, options.reshard.split(",")):
        worlds = [_restart_world(options, own, part.strip()) for part in text.split(":")]
        route = Route((own, *worlds))
        if route in found:
            raise UsageError(f"--chaos-reshard {options.reshard!r} names {route.restarts} twice")
        if len(worlds) > options.max_restarts:
            raise UsageError(
                f"--chaos-reshard: {route.restarts} takes {len(worlds)} restarts, the limit is "
                f"{options.max_restarts}: raise --chaos-max-restarts"
            )
        found.append(route)
    return tuple(found)


def _restart_world(options: ChaosOptions, own: World, text: str) -> World:
    try:
        topology = Topology.parse(text)
        ranks = topology.world_size
        divides = ranks % own.ranks_per_node == 0
        nodes = ranks // own.ranks_per_node if divides and own.nodes > 1 else 1
        world = World(ranks=ranks, topology=str(topology), nodes=nodes, device=options.device)
    except RecoveryError as error:
        raise UsageError(f"--chaos-reshard: {error}") from None
    check_bundled(options.job, _params(options), world.topology)
    return own if Topology.parse(own.topology) == topology else world


def handover(options: ChaosOptions, route: Route) -> Handover:
    """How the job hands its state along ``route``, for the oracle of resharded restores."""
    workload = experiment(options).workload

    def leg(taken: Path | None, given: Path | None, steps: int | None) -> Workload:
        changes = {"take_over": taken and str(taken), "hand_off": given and str(given)}
        more = {name: value for name, value in changes.items() if value}
        limit = {} if steps is None else {"stop_after": steps}
        return replace(workload, arguments=workload.arguments | more | limit)

    return Handover(route=route, leg=leg)


def _file_system_of(store: str) -> tuple[str, ...]:
    """What a warm parent should import besides the job."""
    return ("s3fs",) if store.startswith(("s3:", "s3a:")) else ()


def crippled(workload: Workload, component: str, *, stop_after: int) -> Workload:
    """The same job with a restore that leaves ``component`` out."""
    more = {"omit": component, "stop_after": stop_after}
    return replace(workload, arguments=workload.arguments | more)


def as_arguments(options: ChaosOptions) -> str:
    """The options that differ from their defaults, as they would be typed."""
    words = ["--chaos"]
    for option in OPTIONS:
        value = getattr(options, option.name)
        if option.name == "fault" or value == getattr(ChaosOptions(), option.name):
            continue
        for each in value if option.repeatable else [value]:
            words += [option.flag, str(each)]
    return shlex.join(words)
