"""The garbage collector is held back while somebody is inside, and runs again afterwards."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from seatrial.recovery.garbage import collection_paused


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    yield
    gc.enable()


def test_nested_and_after_an_error() -> None:
    @collection_paused()
    def fail() -> None:
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with collection_paused():
        pass
    assert not gc.isenabled()


def test_the_last_of_several_threads_switches_it_on() -> None:
    inside, leave = threading.Event(), threading.Event()

    @collection_paused()
    def stay() -> None:
        inside.set()
        leave.wait()

    thread = threading.Thread(target=stay)
    with collection_paused():
        thread.start()
        inside.wait()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()
