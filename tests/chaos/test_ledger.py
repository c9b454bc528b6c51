"""The ledger of strikes: who may strike, once, whatever the number of processes that want to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.chaos.ledger import Ledger, Strike


def strike(*, fault: int = 0, rank: int = 1, attempt: int = 1, t: float = 1.0) -> Strike:
    return Strike(
        fault=fault,
        action="kill",
        rank=rank,
        attempt=attempt,
        event="data",
        edge="before",
        step=2,
        t=t,
    )


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path)


def test_a_fault_strikes_a_rank_once(ledger: Ledger) -> None:
    assert ledger.claim(strike(), persistent=False)
    assert not ledger.claim(strike(), persistent=False)


def test_a_fault_that_struck_does_not_strike_in_the_next_attempt(ledger: Ledger) -> None:
    assert ledger.claim(strike(attempt=1), persistent=False)
    assert not ledger.claim(strike(attempt=2), persistent=False)
    assert ledger.has_struck(0, 1)


def test_a_persistent_fault_strikes_once_in_every_attempt(ledger: Ledger) -> None:
    assert ledger.claim(strike(attempt=1), persistent=True)
    assert not ledger.claim(strike(attempt=1), persistent=True)
    assert ledger.claim(strike(attempt=2), persistent=True)


def test_each_rank_and_each_fault_has_its_own_claim(ledger: Ledger) -> None:
    assert ledger.claim(strike(fault=0, rank=0), persistent=False)
    assert ledger.claim(strike(fault=0, rank=1), persistent=False)
    assert ledger.claim(strike(fault=1, rank=0), persistent=False)


def test_a_refused_claim_leaves_the_first_strike_as_it_was(ledger: Ledger) -> None:
    ledger.claim(strike(t=1.0), persistent=False)
    ledger.claim(strike(t=2.0, attempt=2), persistent=False)
    assert ledger.strikes() == [strike(t=1.0)]


def test_strikes_are_read_back_oldest_first_and_whole(ledger: Ledger, tmp_path: Path) -> None:
    late, early = strike(fault=0, t=9.0), strike(fault=1, t=3.0)
    ledger.claim(late, persistent=False)
    ledger.claim(early, persistent=False)
    assert Ledger(tmp_path).strikes() == [early, late]
    assert len(list(tmp_path.iterdir())) == 2


def test_of_many_processes_exactly_one_gets_each_claim(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from seatrial.chaos.ledger import Ledger, Strike\n"
        "ledger = Ledger(pathlib.Path(sys.argv[1]))\n"
        "sys.stdin.read()\n"
        "for rank in range(50):\n"
        "    strike = Strike(fault=0, action='kill', rank=rank, attempt=1, event='data',\n"
        "                    edge='before', step=1, t=float(rank))\n"
        "    if ledger.claim(strike, persistent=False): print(rank)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    claimed = [int(rank) for process in processes for rank in process.communicate()[0].split()]
    assert sorted(claimed) == list(range(50))
    assert len(Ledger(tmp_path).strikes()) == 50
