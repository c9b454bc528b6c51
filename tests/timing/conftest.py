from __future__ import annotations

from collections.abc import Iterator

import pytest

from seatrial.chaos.session import Session


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Runs trials; references are shared with the other workers of this pytest."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if base.name.startswith("popen-") else base
    session = Session(shared / "timed-trials", owner=base.name)
    yield session
    session.close()
