"""Every item is worked on once, and an error in any thread is raised when all have stopped."""

from __future__ import annotations

import threading

import pytest

from seatrial.recovery.workers import reader_threads, run_all, writer_threads


@pytest.mark.parametrize("threads", [1, 2, 4, 50])
def test_every_item_is_worked_on_once(threads: int) -> None:
    done: list[int] = []
    run_all(done.append, range(30), threads=threads)
    assert sorted(done) == list(range(30))
    assert not [each for each in threading.enumerate() if "seatrial" in each.name]


def test_nothing_to_do_starts_nothing() -> None:
    run_all(lambda item: 1 / 0, [], threads=4)


def test_one_item_is_worked_on_by_the_caller() -> None:
    by: list[threading.Thread] = []
    run_all(lambda _: by.append(threading.current_thread()), [0], threads=4)
    assert by == [threading.current_thread()]


@pytest.mark.parametrize("failing_helper", [True, False])
def test_an_error_in_any_thread_is_raised_and_stops_the_others(failing_helper: bool) -> None:
    both = threading.Barrier(2)
    caller = threading.current_thread()
    done: list[int] = []

    def work(item: int) -> None:
        if item < 2:
            both.wait(60)
            if (threading.current_thread() is caller) is not failing_helper:
                raise ValueError(item)
        done.append(item)

    with pytest.raises(ValueError, match=r"^[01]$"):
        run_all(work, range(10_000_000), threads=2)
    assert len(done) < 10_000_000
    assert not [each for each in threading.enumerate() if "seatrial" in each.name]


def test_an_interrupt_of_the_caller_waits_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller = threading.current_thread()
    begun = threading.Event()

    def work(_: int) -> None:
        if threading.current_thread() is caller:
            assert begun.wait(60)
            raise KeyboardInterrupt
        begun.set()

    with pytest.raises(KeyboardInterrupt):
        run_all(work, range(10_000_000), threads=3)
    assert not [each for each in threading.enumerate() if "seatrial" in each.name]


def test_where_no_thread_can_be_started_the_caller_does_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    run_all(done.append, range(5), threads=4)
    assert done == list(range(5))


@pytest.mark.parametrize(
    ("processors", "ranks_here", "reading", "writing"),
    [(2, "2", 1, 2), (2, "1", 2, 2), (64, "8", 4, 4), (8, "4", 2, 2), (4, None, 1, 2)],
)
def test_ranks_share_the_processors_and_a_writer_is_never_alone(
    monkeypatch: pytest.MonkeyPatch,
    processors: int,
    ranks_here: str | None,
    reading: int,
    writing: int,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(processors))
    if ranks_here is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_here)
    assert (reader_threads(), writer_threads()) == (reading, writing)
