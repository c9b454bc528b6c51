from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from evidence import Evidence, uninterrupted

from seatrial.chaos.launch.launcher import LocalLauncher
from seatrial.chaos.launch.plan import Workload, World
from seatrial.chaos.run import Run, StoreState
from seatrial.chaos.schedule import Schedule
from seatrial.chaos.session import Session
from seatrial.chaos.supervisor import Assignment, Limits, supervise

SuperviseProgram = Callable[..., Run]


@pytest.fixture
def reference(tmp_path: Path) -> Evidence:
    """Six steps, and nothing was done to them."""
    return uninterrupted(tmp_path / "reference")


@pytest.fixture
def run(tmp_path: Path) -> Evidence:
    """A run of which nothing is known yet."""
    return Evidence(tmp_path / "run")


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Runs trials; references are shared with the other workers of this pytest."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if base.name.startswith("popen-") else base
    session = Session(shared / "trials", owner=base.name)
    yield session
    session.close()


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalLauncher]:
    """A warm launcher for all tests of this process."""
    scratch = tmp_path_factory.mktemp("launcher")
    with LocalLauncher(method="fork", scratch=[scratch], preload=("rank_programs",)) as warm:
        yield warm


@pytest.fixture(scope="session")
def supervise_program(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> SuperviseProgram:
    """``supervise_program("train", "kill rank=1 at=step:3", steps=5)`` runs ranks to the end.

    ``module`` is the module of the program.
    """

    def run(
        program: str,
        schedule: str = "clean",
        *,
        ranks: int = 2,
        nodes: int = 1,
        max_restarts: int = 0,
        silence_s: float = 30.0,
        stopped_silence_s: float | None = None,
        total_s: float = 3600.0,
        by: LocalLauncher | None = None,
        module: str = "rank_programs",
        **arguments: object,
    ) -> Run:
        directory = tmp_path_factory.mktemp("supervised")
        store = directory / "store"
        store.mkdir()
        assignment = Assignment(
            workload=Workload(entry=f"{module}:{program}", arguments=arguments),
            world=World(ranks=ranks, nodes=nodes, topology=f"dp{ranks}", device="cpu"),
            schedule=Schedule.parse(schedule),
            seed=3,
            limits=Limits(
                max_restarts=max_restarts,
                silence_s=silence_s,
                stopped_silence_s=stopped_silence_s or silence_s,
                total_s=total_s,
            ),
            store=str(store),
            directory=directory / "run",
            inspect=lambda _: StoreState(),
        )
        return supervise(assignment, by or request.getfixturevalue("launcher"))

    return run
