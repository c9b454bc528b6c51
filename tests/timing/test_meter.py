"""Waits for calls, and what is hidden behind calls under way: on a clock that the test moves.

That real calls are told to the meter, and real threads to the clock, is for test_ranks.
"""

from __future__ import annotations

import os
import threading
import time

import pytest
from scripted_clock import ScriptedClock

from seatrial.recovery.collectives.clock import ThreadClock
from seatrial.recovery.collectives.meter import Meter


@pytest.fixture
def clock() -> ScriptedClock:
    return ScriptedClock()


@pytest.fixture
def meter(clock: ScriptedClock) -> Meter:
    return Meter(clock)


def wait(meter: Meter, clock: ScriptedClock, token: int, seconds: float) -> None:
    starved, start = meter.waits(), clock.now.wall
    clock.sleeps(seconds)
    meter.waited(token, start, clock.now.wall, starved)


def test_a_call_that_is_waited_for_at_once_hides_nothing(
    meter: Meter, clock: ScriptedClock
) -> None:
    wait(meter, clock, meter.began(clock.now.wall), 2.0)
    clock.computes(5.0)
    assert (meter.waited_s, meter.hidden_s) == (2.0, 0.0)


def test_what_is_done_between_call_and_wait_is_hidden(meter: Meter, clock: ScriptedClock) -> None:
    call = meter.began(clock.now.wall)
    clock.computes(3.0)
    wait(meter, clock, call, 1.0)
    assert (meter.waited_s, meter.hidden_s) == (1.0, 3.0)


def test_calls_under_way_together_count_once(meter: Meter, clock: ScriptedClock) -> None:
    first = meter.began(clock.now.wall)
    clock.computes(1.0)
    second = meter.began(clock.now.wall)
    clock.computes(1.0)
    wait(meter, clock, first, 0.5)
    clock.computes(1.0)  # the second is still under way
    wait(meter, clock, second, 0.5)
    clock.computes(9.0)
    assert (meter.waited_s, meter.hidden_s) == (1.0, 3.0)


def test_a_thread_that_could_go_on_and_has_no_processor_does_not_wait_for_the_call(
    meter: Meter, clock: ScriptedClock
) -> None:
    call = meter.began(clock.now.wall)
    starved, start = meter.waits(), clock.now.wall
    clock.sleeps(1.0)
    clock.starves(4.0)
    meter.waited(call, start, clock.now.wall, starved)
    assert meter.waited_s == 1.0


def test_a_wait_for_futures_is_what_the_thread_did_not_do_itself(
    meter: Meter, clock: ScriptedClock
) -> None:
    for _ in range(2):
        token = meter.began(clock.now.wall)
        clock.computes(1.0)
        meter.took_future(token)
    clock.computes(2.0)
    clock.sleeps(7.0)  # in C++
    clock.starves(3.0)
    meter.settle(clock.read())
    clock.computes(5.0)  # nothing is under way any more
    assert (meter.waited_s, meter.hidden_s) == (7.0, 7.0)


def test_a_wait_that_was_seen_is_not_counted_with_the_futures_again(
    meter: Meter, clock: ScriptedClock
) -> None:
    meter.took_future(meter.began(clock.now.wall))
    wait(meter, clock, meter.began(clock.now.wall), 2.0)
    clock.sleeps(1.0)
    meter.settle(clock.read())
    assert meter.waited_s == 3.0


def test_sleep_after_the_futures_were_waited_for_is_no_wait(
    meter: Meter, clock: ScriptedClock
) -> None:
    meter.took_future(meter.began(clock.now.wall))
    meter.settle(clock.read())
    clock.sleeps(6.0)
    meter.settle(clock.read())
    assert meter.waited_s == 0.0


def test_a_call_that_nobody_waits_for_hides_nothing_after_its_period(
    meter: Meter, clock: ScriptedClock
) -> None:
    forgotten = meter.began(clock.now.wall)
    clock.computes(2.0)
    meter.end_period(clock.now.wall)
    clock.computes(8.0)
    call = meter.began(clock.now.wall)
    clock.computes(1.0)
    wait(meter, clock, forgotten, 0.0)
    clock.computes(1.0)  # the second call is under way all the same
    wait(meter, clock, call, 0.0)
    assert meter.hidden_s == 4.0


def test_other_threads_are_not_counted(meter: Meter, clock: ScriptedClock) -> None:
    own = meter.began(0.0)

    def elsewhere() -> None:
        meter.took_future(own)
        token = meter.began(0.0)
        meter.took_future(token)
        meter.waited(token, 0.0, 9.0, meter.waits())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    clock.sleeps(9.0)
    meter.settle(clock.read())
    assert (meter.waited_s, meter.hidden_s) == (0.0, 0.0)


def test_a_clock_tells_sleep_from_work() -> None:
    clock = ThreadClock()
    before = clock.read()
    time.sleep(0.01)
    slept = clock.read()
    while clock.read().cpu < slept.cpu + 0.01:
        pass
    worked = clock.read()
    clock.close()

    def idle(since: tuple[float, ...], now: tuple[float, ...]) -> float:
        wall, cpu, starved = (b - a for a, b in zip(since, now, strict=True))
        return wall - cpu - starved

    assert idle(before, slept) > 0.009 > idle(slept, worked)


def test_a_clock_knows_what_threads_of_the_process_went_without() -> None:
    clock = ThreadClock()
    before = clock.others_starved()
    threads = [threading.Thread(target=compute, args=(0.05,)) for _ in range(4)]
    for thread in threads:
        thread.start()  # all want Python's lock, and processors
    during = clock.others_starved()
    for thread in threads:
        thread.join()
    after = clock.others_starved()
    assert 0.0 <= before <= during <= after
    assert set(clock._others) <= set(os.listdir("/proc/self/task"))
    clock.close()


def compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
