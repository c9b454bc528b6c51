"""The tiny job with checkpoints of its own: `torch.save` and `os.replace`, or safetensors.

One file for each rank and step, written under another name and renamed; restored from the newest
step of which every rank has its file. Nothing is synced, and nothing is checked unless asked for.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tiny_job import TinyJob

from seatrial.recovery.state import TrainingState


def checksum(values: dict[str, Any]) -> str:
    """Of the weights and everything else, as it is in memory."""
    weights = [tensor.numpy().tobytes() for tensor in values["model"].values()]
    return hashlib.sha256(b"".join(weights) + repr(values).encode()).hexdigest()


class TorchSaveJob(TinyJob):
    """``mode``: ``plain``; ``checks`` writes a checksum into another file, and falls back to an
    older step if it does not match; ``elsewhere`` writes to ``place`` and not to its store."""

    def __init__(self, *, mode: str = "plain", place: str = "", **options: object) -> None:
        super().__init__(**options)
        self.mode, self.place = mode, place

    def save_checkpoint(self, context: Any, state: TrainingState) -> None:
        directory = self._root(context) / f"ckpt-{state.progress.step}"
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / f".rank-{context.rank}.tmp"
        values = self._values(state)
        self.write(temporary, values)
        os.replace(temporary, directory / f"rank-{context.rank}")
        if self.mode == "checks":
            (directory / f"sum-{context.rank}").write_text(checksum(values))

    def load_checkpoint(self, context: Any, state: TrainingState) -> bool:
        for directory in self._steps(context):
            path = directory / f"rank-{context.rank}"
            values = self.read(path) if path.exists() else None
            is_good = torch.tensor(int(values is not None and self._is_intact(path, values)))
            dist.all_reduce(is_good, dist.ReduceOp.MIN)
            if values is not None and is_good:
                self._put_back(values, state)
                return True
        return False

    def write(self, path: Path, values: dict[str, Any]) -> None:
        torch.save(values, path)

    def read(self, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = torch.load(path, weights_only=False)
        return values

    def _root(self, context: Any) -> Path:
        if self.mode != "elsewhere":
            return Path(context.store)
        return Path(self.place) / context.store.replace("/", "_")

    def _steps(self, context: Any) -> list[Path]:
        found = self._root(context).glob("ckpt-*")
        return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)

    def _is_intact(self, path: Path, values: dict[str, Any]) -> bool:
        written = path.with_name(path.name.replace("rank", "sum"))
        return self.mode != "checks" or written.read_text() == checksum(values)

    def _values(self, state: TrainingState) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "sampler": self.sampler.state_dict(),
            "noise": self.noise.get_state(),
            "rng": (torch.get_rng_state(), np.random.get_state(), random.getstate()),
            "progress": dict(vars(state.progress)),
        }

    def _put_back(self, values: dict[str, Any], state: TrainingState) -> None:
        self.model.load_state_dict(values["model"])
        self.optimizer.load_state_dict(values["optimizer"])
        self.scheduler.load_state_dict(values["scheduler"])
        self.sampler.load_state_dict(values["sampler"])
        self.noise.set_state(values["noise"])
        torch.set_rng_state(values["rng"][0])
        np.random.set_state(values["rng"][1])
        random.setstate(values["rng"][2])
        vars(state.progress).update(values["progress"])


class SafetensorsJob(TorchSaveJob):
    """The weights by safetensors, the rest by pickle in a file beside them."""

    def write(self, path: Path, values: dict[str, Any]) -> None:
        rest = path.with_name(f"rest-of-{path.name.split('-')[1].removesuffix('.tmp')}.pkl")
        rest.write_bytes(pickle.dumps({k: v for k, v in values.items() if k != "model"}))
        save_file(values["model"], path)

    def read(self, path: Path) -> dict[str, Any]:
        rest = path.with_name(f"rest-of-{path.name.split('-')[1]}.pkl")
        return {"model": load_file(path), **pickle.loads(rest.read_bytes())}
