"""The dump of PyTorch's flight recorder, from a rank that hangs.

Guarantees: a rank writes what its recorder holds when it is asked, from a thread of its own, while
the others wait in C++; files are as ``torchfrtrace`` reads them, one of each rank in a directory.
Nothing of them is unpickled here. A rank that is stopped, or that holds the interpreter's lock for
ever, does not answer.

Does not: switch the recorder on or off, which is torch's to decide (``TORCH_FR_BUFFER_SIZE``, of
2000 calls by default; gloo is recorded since torch 2.8, NCCL always). Torch-free but in ranks.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .launch.launcher import Launcher

_SIGNAL = signal.SIGRTMIN + 8  # that no library is known to use
_PATIENCE_S = 2.0
_PREFIX = "rank_"


def answer_with_flight_record(path: Path) -> None:
    """In a rank, before it starts any thread: write the recorder to ``path`` when it is asked."""
    # Blocked in all threads to come, so that the one that waits for it is who gets it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {_SIGNAL})
    threading.Thread(target=_answer, args=(path,), name="flight recorder", daemon=True).start()


def _answer(path: Path) -> None:
    while True:
        signal.sigwait({_SIGNAL})
        path.parent.mkdir(exist_ok=True)
        partial = path.with_name(f"partial-{path.name}")
        partial.write_bytes(_dump())
        partial.rename(path)


def _dump() -> bytes:
    import torch.distributed as dist
    from torch._C import _distributed_c10d

    of_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    name = "_dump_nccl_trace" if of_nccl else "_dump_fr_trace"
    dump = getattr(_distributed_c10d, name, None)
    found: bytes = b"" if dump is None else dump()
    return found


def record_file(directory: Path, rank: int) -> Path:
    """Where a rank of the attempt in ``directory`` leaves its record."""
    return directory / "flight-recorder" / f"{_PREFIX}{rank}"


def ask_for_flight_records(files: Mapping[int, Path], launcher: Launcher) -> tuple[str, ...]:
    """Lines on the records of the ranks whose ``files`` are given, with names in the run."""
    for rank in files:
        launcher.signal(rank, _SIGNAL)
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline and not all(path.exists() for path in files.values()):
        time.sleep(0.01)
    written = [rank for rank, path in files.items() if path.exists() and path.stat().st_size]
    missing = [rank for rank in files if rank not in written]
    lines = []
    if written:
        directory = files[written[0]].parent
        below = directory.relative_to(directory.parent.parent)
        lines.append(f"flight recorder of rank(s) {_list(written)}: {below}/{_PREFIX}*")
    if missing:
        lines.append(f"no flight recorder of rank(s) {_list(missing)}: no answer, or none in torch")
    return tuple(lines)


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
