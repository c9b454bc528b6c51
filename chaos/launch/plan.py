"""Everything that the processes of one attempt need to know, as a value that travels as JSON.

Torch-free: written by the supervisor, read by the custodian and by every rank.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from seatrial.recovery.topology import Topology

from ..errors import UsageError

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every rank runs: ``entry`` is ``module:function`` called with a `RankContext` and
    ``arguments``. ``preload`` names modules that the warm parent imports once for all ranks."""

    entry: str
    arguments: dict[str, object]
    preload: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class World:
    """How many ranks, on how many (simulated) nodes, in which topology and on which device."""

    ranks: int
    topology: str
    nodes: int = 1
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.nodes < 1 or self.ranks % self.nodes:
            raise UsageError(f"{self.ranks} ranks do not divide evenly over {self.nodes} node(s)")
        if self.device not in DEVICES:
            raise UsageError(f"unknown device {self.device!r}; choose {', '.join(DEVICES)}")
        Topology.parse(self.topology).require(self.ranks)

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes


@dataclass(frozen=True, kw_only=True)
class AttemptPlan:
    """One launch of the whole world.

    ``run_directory`` holds what outlives an attempt (``traces/``, ``strikes/``); ``directory`` is
    this attempt's own (rendezvous file, rank output, temporary files). ``timeout_s`` bounds every
    collective. ``master_port`` was free when the attempt was planned; nothing of ours listens on
    it. ``hosts`` says that each node has a network of its own, and that the process group meets
    over it. Paths are absolute.
    """

    workload: Workload
    world: World
    schedule: str
    seed: int
    attempt: int
    max_restarts: int
    timeout_s: float
    master_port: int
    store: str
    run_directory: str
    directory: str
    hosts: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> AttemptPlan:
        values = json.loads(text)
        workload = Workload(**values.pop("workload"))
        return cls(
            workload=replace(workload, preload=tuple(workload.preload)),
            world=World(**values.pop("world")),
            **values,
        )

    def trace_file(self, rank: int) -> Path:
        """The trace of one rank of this attempt."""
        return trace_file(Path(self.run_directory), self.attempt, rank)

    def calls_file(self, rank: int) -> Path:
        """The log of the collectives of one rank of this attempt."""
        return calls_file(Path(self.run_directory), self.attempt, rank)

    @property
    def network_file(self) -> Path:
        """What the switch between the hosts saw, if there are any."""
        return network_file(Path(self.run_directory), self.attempt)

    def stacks_file(self, rank: int) -> Path:
        """Where one rank writes its stacks when it is asked for them."""
        return Path(self.directory) / f"rank{rank}.stacks"

    def output_file(self, rank: int) -> Path:
        """Where the standard output and error of one rank go."""
        return Path(self.directory) / f"rank{rank}.log"

    def make_directories(self) -> None:
        """Create every directory that the ranks write to."""
        for directory in (
            Path(self.run_directory) / "traces",
            Path(self.run_directory) / "calls",
            Path(self.run_directory) / "strikes",
            Path(self.directory) / "tmp",
        ):
            directory.mkdir(parents=True, exist_ok=True)


def trace_file(run_directory: Path, attempt: int, rank: int) -> Path:
    """The trace of one rank of one attempt of the run in ``run_directory``."""
    return run_directory / "traces" / f"attempt{attempt}-rank{rank}.jsonl"


def network_file(run_directory: Path, attempt: int) -> Path:
    """What the switch between the hosts of one attempt saw."""
    return run_directory / "traces" / f"attempt{attempt}-network.jsonl"


def calls_file(run_directory: Path, attempt: int, rank: int) -> Path:
    """The log of one rank's collectives; see `seatrial.recovery.collectives.log`."""
    return run_directory / "calls" / f"attempt{attempt}-rank{rank}.calls"
