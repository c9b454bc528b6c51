"""The TCP connections between hosts: which wait for an answer that cannot come, and resetting them.

Guarantees: a connection of torchrun's own rendezvous is never counted: that an agent noticed
something says nothing about the job. Connections inside one host cross no link, and do not count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .layout import RENDEZVOUS_PORT, address
from .namespaces import Namespace


@dataclass(frozen=True)
class Connection:
    """One end of a connection to another host. ``unheard_bytes`` were not acknowledged; bytes that
    were sent again are ``sent_bytes`` once."""

    local: str
    peer: str
    state: str
    unheard_bytes: int
    sent_bytes: int
    received_bytes: int

    def __str__(self) -> str:
        return f"{self.local}-{self.peer}"


def connections(hosts: Sequence[Namespace], host: int) -> list[Connection]:
    """What the host's kernel has open to other hosts, but for torchrun's rendezvous."""
    others = [other for other in range(len(hosts)) if other != host]
    if not others:
        return []
    said = hosts[host].run("ss", "-HtniO", "state", "connected", *_to(others))
    # A socket that speaks IPv6 shows IPv4 addresses as [::ffff:10.77.0.101].
    found = map(_read, said.replace("[::ffff:", "").replace("]", "").splitlines())
    return [each for each in found if each.state != "TIME-WAIT" and not _is_rendezvous(each)]


def waiting(hosts: Sequence[Namespace], host: int, way: str) -> list[Connection]:
    """The connections over the host's link with bytes that a cut ``way`` keeps from arriving.

    Bytes that did arrive are none of them, though their acknowledgement may be lost.
    """
    ends = [connections(hosts, each) for each in range(len(hosts))]
    arrived = {(c.local, c.peer): c.received_bytes for own in ends for c in own}

    def is_kept_up(sender: Connection) -> bool:
        there = arrived.get((sender.peer, sender.local))
        if there is None:  # nobody is there, or not yet
            return sender.unheard_bytes > 0
        return sender.unheard_bytes > 0 and sender.sent_bytes > there

    outward = ends[host] if way in ("both", "out") else []
    inward = [
        each
        for other, own in enumerate(ends)
        for each in (own if other != host and way in ("both", "in") else [])
        if each.peer.startswith(f"{address(host)}:")
    ]
    return [each for each in (*outward, *inward) if is_kept_up(each)]


def _read(line: str) -> Connection:
    state, _, unheard, local, peer = line.split()[:5]
    counts = dict(re.findall(r" (bytes_\w+):(\d+)", line))  # those that are 0 are not there
    return Connection(
        local=local,
        peer=peer,
        state=state,
        unheard_bytes=int(unheard),
        sent_bytes=int(counts.get("bytes_sent", 0)) - int(counts.get("bytes_retrans", 0)),
        received_bytes=int(counts.get("bytes_received", 0)),
    )


def _is_rendezvous(connection: Connection) -> bool:
    return any(end.endswith(f":{RENDEZVOUS_PORT}") for end in (connection.local, connection.peer))


def reset(hosts: Sequence[Namespace], host: int) -> list[Connection]:
    """Reset every connection of the host to others; returns those that are gone by it.

    The kernel aborts the host's end and sends the other end a RST.

    Raises:
        RuntimeError: the kernel cannot (``CONFIG_INET_DIAG_DESTROY``).
    """
    before = connections(hosts, host)
    others = [other for other in range(len(hosts)) if other != host]
    if others:
        hosts[host].run("ss", "-K", "-Htn", "state", "connected", *_to(others))
    left = {str(each) for each in connections(hosts, host)}
    if before and left >= {str(each) for each in before}:
        raise RuntimeError("ss -K closed nothing: the kernel has no CONFIG_INET_DIAG_DESTROY")
    return [each for each in before if str(each) not in left]


def _to(others: Sequence[int]) -> list[str]:
    """A filter of ss: connections to any of these hosts."""
    each = [f"dst {address(other)}" for other in others]
    return ["(", *" or ".join(each).split(), ")"]
