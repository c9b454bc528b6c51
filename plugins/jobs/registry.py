"""Finding a job by name: bundled ones, ``module:Class``, or ``file.py:Class``.

`check_job_name` needs neither torch nor the job itself and is meant for the process that validates
options; `load_job` imports the job and is meant for ranks.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from seatrial.chaos.errors import UsageError

if TYPE_CHECKING:
    from .protocol import Job

BUNDLED = {"gpt": "seatrial.plugins.jobs.gpt:GPTJob"}
_CHECKS = {"gpt": "seatrial.plugins.jobs.gpt_config"}


def resolve_job(name: str, directories: Iterable[Path]) -> str:
    """``file.py:Class`` with the absolute path of the file in the first directory that has it.

    Any other name, and a file that no directory has, is returned as it is.
    """
    path, colon, class_name = name.rpartition(":")
    if colon and path.endswith(".py"):
        for directory in directories:
            if (directory / path).is_file():
                return f"{(directory / path).resolve()}:{class_name}"
    return name


def check_bundled(name: str, params: Mapping[str, object], topology: str) -> None:
    """Raise `UsageError` for what a bundled job does not take; other jobs are not known."""
    if name in _CHECKS:
        importlib.import_module(_CHECKS[name]).check(params, topology)


def check_job_name(name: str) -> None:
    """Raise `UsageError` unless ``name`` names something that could be imported."""
    module, class_name = _split(name)
    if module.endswith(".py"):
        found = Path(module).is_file()
    else:
        try:
            found = importlib.util.find_spec(module) is not None
        except (ImportError, ValueError):
            found = False
    if not found and module.endswith(".py"):
        raise UsageError(f"job {name!r}: there is no file {module} in {Path.cwd()}")
    if not found or not class_name.isidentifier():
        raise UsageError(
            f"unknown job {name!r}: name a bundled job ({', '.join(BUNDLED)}), 'module:Class' "
            "or 'file.py:Class'"
        )


def load_job(name: str, params: Mapping[str, object]) -> Job:
    """Import the job's class and make one with ``params`` as keyword arguments.

    Raises:
        UsageError: no such class, or it does not take these parameters.
    """
    path, class_name = _split(name)
    module = _load_file(Path(path)) if path.endswith(".py") else importlib.import_module(path)
    make: Callable[..., Job] | None = getattr(module, class_name, None)
    if make is None:
        raise UsageError(f"job {name!r}: {path} has no {class_name}")
    if not callable(make):
        raise UsageError(f"job {name!r}: {class_name} is {make!r}, and no class")
    _require_parameters(name, make, params)
    job = make(**params)
    for method in ("build", "step"):
        if not callable(getattr(job, method, None)):
            raise UsageError(f"job {name!r} has no method {method}(context)")
    return job


def _require_parameters(name: str, make: Callable[..., Job], params: Mapping[str, object]) -> None:
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):
        return  # written in C: it says so itself
    try:
        signature.bind(**params)
    except TypeError as error:
        raise UsageError(f"job {name!r} does not take these parameters: {error}") from None


def preload_modules(name: str) -> tuple[str, ...]:
    """Modules that a warm parent should import for this job."""
    module, _ = _split(name)
    return ("seatrial.plugins.jobs.loop",) + (() if module.endswith(".py") else (module,))


def _split(name: str) -> tuple[str, str]:
    module, _, class_name = BUNDLED.get(name, name).rpartition(":")
    return module, class_name


def _load_file(path: Path) -> ModuleType:
    name = f"seatrial_job_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
