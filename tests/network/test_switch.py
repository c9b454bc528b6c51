"""What goes wrong between hosts, seen from sockets on them, and what the switch says of it.

Does not verify: ranks; see `test_trials`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from seatrial.chaos.errors import LaunchError
from seatrial.chaos.launch.processes import descendants
from seatrial.chaos.network.control import ask
from seatrial.chaos.network.layout import HOSTS_MAX, RENDEZVOUS_PORT, address
from seatrial.chaos.network.namespaces import program
from seatrial.chaos.trace import Record

from .conftest import Network

_WHILE_S = 0.3
"""Long enough for any packet, were it not lost: they take some microseconds."""


def arrives(sender: socket.socket, receiver: socket.socket) -> bool:
    """Whether what is sent now is there in a moment."""
    sender.sendall(b"x")
    receiver.settimeout(_WHILE_S)
    try:
        return bool(receiver.recv(1))
    except TimeoutError:
        return False


def told(seen: list[Record], kind: str, **facts: object) -> Record:
    """The only record of a kind with these facts."""
    (record,) = [r for r in seen if r["kind"] == kind and facts.items() <= r.items()]
    return record


def receive(receiver: socket.socket, size_bytes: int) -> None:
    """Wait for that much; fails if nothing comes for long."""
    while size_bytes > 0:
        size_bytes -= len(receiver.recv(size_bytes))


def held_back(network: Network) -> int:
    return int(str([record["times"] for record in network.ask("look") if "times" in record][-1]))


def test_addresses_have_the_order_in_which_torchrun_numbers_hosts() -> None:
    addresses = [address(host) for host in range(HOSTS_MAX)]
    assert addresses == sorted(addresses)
    assert len(set(addresses)) == HOSTS_MAX


def test_hosts_reach_each_other_and_nothing_else(network: Network) -> None:
    near, far = network.connect(0, 2)
    assert arrives(near, far)
    command = [*network.on_host(0), "ip", "-o", "link"]
    links = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split(":")[1].split("@")[0].strip() for line in links.splitlines()] == [
        "lo",
        "eth0",
    ]
    own = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    assert "switch" not in own


def test_a_cut_host_neither_hears_nor_is_heard_and_the_others_talk(network: Network) -> None:
    near, far = network.connect(0, 1)
    bystander, other = network.connect(0, 2)
    assert arrives(near, far)
    network.ask("partition")
    assert not arrives(near, far)
    assert not arrives(far, near)
    assert arrives(bystander, other)
    link = told(network.ask("look"), "link")
    assert (link["host"], link["way"]) == (1, "both")
    assert len(link["waiting"]) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["out", "in"])
def test_a_cut_of_one_way_loses_that_way_alone(network: Network, way: str) -> None:
    outside, inside = network.connect(0, 1)
    assert arrives(outside, inside)
    network.ask("partition", way=way)
    assert arrives(outside, inside) == (way == "out")
    assert arrives(inside, outside) == (way == "in")
    seen = network.ask("look")
    assert told(seen, "link")["way"] == way
    assert len(told(seen, "network", did="kept")["waiting"]) == 1  # type: ignore[arg-type]


def test_a_cut_that_heals_delivers_what_was_sent_and_says_who_waited(network: Network) -> None:
    near, far = network.connect(0, 1)
    network.ask("partition", heal=0.2)
    near.sendall(b"late")
    assert far.recv(4) == b"late"
    seen = network.ask("look")
    cut, kept, healed = (told(seen, "network", did=did) for did in ("cut", "kept", "heal"))
    assert len(kept["waiting"]) == 1  # type: ignore[arg-type]
    assert float(str(healed["t"])) - float(str(cut["t"])) >= 0.2
    assert not [record for record in seen if record["kind"] == "link"]


def test_what_had_arrived_before_a_cut_does_not_wait_for_its_acknowledgement(
    network: Network,
) -> None:
    """Which kernels delay by some milliseconds, so that a cut may lose it."""
    near, far = network.connect(0, 1)
    for _ in range(20):  # a new connection acknowledges at once
        near.sendall(b"ping")
        far.sendall(far.recv(4))
        near.recv(4)
    near.sendall(b"last")
    network.ask("partition")
    assert far.recv(4) == b"last"
    assert told(network.ask("look"), "network", did="kept")["waiting"] == []


def test_of_two_cuts_of_a_link_the_last_to_end_mends_it(network: Network) -> None:
    near, far = network.connect(0, 1)
    network.ask("partition", fault=0)
    network.ask("partition", fault=1, heal=0.01)
    time.sleep(0.05)
    assert not arrives(near, far)
    assert told(network.ask("look"), "link")["host"] == 1


def test_a_cut_that_nothing_was_sent_over_kept_nobody(network: Network) -> None:
    near, far = network.connect(0, 1)
    assert arrives(near, far)
    network.ask("partition")
    assert told(network.ask("look"), "network", did="kept")["waiting"] == []


def test_a_slow_link_holds_back_what_is_more_than_its_rate_and_loses_nothing(
    network: Network,
) -> None:
    near, far = network.connect(0, 1)
    network.ask("throttle", rate=100_000.0)
    assert told(network.ask("look"), "network", did="held back")["times"] == 0
    near.sendall(b"x" * 30_000)
    receive(far, 30_000)
    assert held_back(network) > 0


def test_torchrun_s_own_rendezvous_is_not_held_back_by_a_slow_link_and_the_job_is(
    network: Network,
) -> None:
    near, far = network.connect(1, 0, port=RENDEZVOUS_PORT)
    network.ask("throttle", rate=20_000.0)
    for sender, receiver in ((near, far), (far, near)):
        sender.sendall(b"x" * 100_000)  # five seconds of the slow queue
        receive(receiver, 100_000)
    assert held_back(network) == 0
    near, far = network.connect(1, 0)
    near.sendall(b"x" * 10_000)
    receive(far, 10_000)
    assert held_back(network) > 0


def test_a_slow_link_may_become_slower(network: Network) -> None:
    near, far = network.connect(0, 1)
    network.ask("throttle", rate=1_000_000_000.0)
    network.ask("throttle", rate=100_000.0)
    near.sendall(b"x" * 10_000)
    receive(far, 10_000)
    assert held_back(network) > 0


def test_a_reset_breaks_both_ends_of_the_host_s_connections_and_no_others(
    network: Network,
) -> None:
    ends = network.connect(0, 1)
    bystander, other = network.connect(0, 2)
    seen = network.ask("reset")
    assert len(told(seen, "network", did="reset")["gone"]) == 1  # type: ignore[arg-type]
    for end in ends:
        with pytest.raises(ConnectionError):
            end.recv(1)
    assert arrives(bystander, other)


def test_torchrun_s_own_rendezvous_counts_for_no_evidence(network: Network) -> None:
    near, _ = network.connect(1, 0, port=RENDEZVOUS_PORT)
    network.ask("partition")
    near.sendall(b"are you there?")
    assert told(network.ask("look"), "network", did="kept")["waiting"] == []
    seen = network.ask("reset")
    assert told(seen, "network", did="reset")["gone"] == []


def test_a_crash_kills_every_process_of_the_host_and_none_elsewhere(network: Network) -> None:
    def start(host: int, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*network.on_host(host), *command])

    parent = start(1, "sh", "-c", "sleep 3600 & wait")
    bystander = start(2, "sleep", "3600")
    try:
        while not descendants(parent.pid):
            time.sleep(0.01)
        (child,) = descendants(parent.pid)
        seen = network.ask("crash")
        assert parent.wait(10) == -signal.SIGKILL
        assert not os.path.exists(f"/proc/{child}/ns/net")
        killed = told(seen, "network", did="crash")["killed"]
        assert sorted(str(each).partition(" ")[0] for each in killed) == sorted(  # type: ignore[attr-defined]
            map(str, (parent.pid, child))
        )
        assert bystander.poll() is None
    finally:
        for process in (parent, bystander):
            process.kill()
            process.wait()


def test_what_the_switch_cannot_do_is_an_error_and_it_goes_on(network: Network) -> None:
    with pytest.raises(LaunchError, match=r"the network between the hosts: .*'way'"):
        ask(network.directory, do="partition", fault=0, host=1, heal=None)
    with pytest.raises(LaunchError, match="unknown request 'explode'"):
        network.ask("explode")
    assert network.ask("look")[0]["failed"]


def test_there_is_no_switch_where_there_are_no_hosts(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        ask(tmp_path, do="look")


@pytest.mark.usefixtures("available")
def test_a_link_that_cannot_be_mended_is_told_and_the_switch_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    tc = programs / "tc"
    case = '*"qdisc del"*) echo "not today" >&2; exit 2;;'
    tc.write_text(f'#!/bin/sh\ncase "$*" in {case} esac\nexec "{program("tc")}" "$@"\n')
    tc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    network = Network(tmp_path)
    try:
        network.ask("partition", way="out", heal=0.01)
        network.ask("partition", fault=1, host=2, heal=0.05)
        deadline = time.monotonic() + 60
        while not [r for r in network.ask("look") if r.get("did") == "heal"]:
            assert time.monotonic() < deadline
        seen = network.seen()
        assert [r["fault"] for r in seen if "not today" in str(r.get("failed"))] == [0]
        assert told(seen, "network", did="heal")["fault"] == 1
    finally:
        network.close()


@pytest.mark.usefixtures("available")
def test_the_switch_may_be_asked_from_any_depth_of_directories(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100) / ("y" * 100)
    deep.mkdir(parents=True)
    network = Network(deep)
    try:
        network.ask("look")
    finally:
        network.close()


def test_with_the_switch_every_link_is_gone(network: Network) -> None:
    near, far = network.connect(0, 1)
    os.kill(network.process.pid, signal.SIGKILL)
    os.waitpid(network.process.pid, 0)
    deadline = time.monotonic() + 60  # the kernel takes its time to remove what nobody holds
    while arrives(near, far):
        assert time.monotonic() < deadline


def test_a_sender_is_not_told_that_its_packets_are_lost(network: Network) -> None:
    """Or TCP would try again every half second and give up after eight."""
    near, _ = network.connect(1, 0)
    network.ask("partition", way="out")
    near.sendall(b"x")
    command = [*network.on_host(1), "ss", "-Htino", "state", "established"]
    deadline, said = time.monotonic() + 20, ""
    while "backoff:" not in said:  # it waits longer from try to try
        assert time.monotonic() < deadline, said
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        time.sleep(0.05)
