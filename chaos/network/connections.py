"""The TCP connections between hosts: which wait for an answer that cannot come, and resetting them.

Guarantees: a connection of torchrun's own rendezvous is never counted: that an agent noticed
something says nothing about the job. Connections inside one host cross no link, and do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .layout import RENDEZVOUS_PORT, address
from .namespaces import Namespace


@dataclass(frozen=True)
class Connection:
    """One end of a connection to another host. ``unheard_bytes`` were sent and not acknowledged."""

    local: str
    peer: str
    state: str
    unheard_bytes: int

    def __str__(self) -> str:
        return f"{self.local}-{self.peer}"


def connections(hosts: Sequence[Namespace], host: int) -> list[Connection]:
    """What the host's kernel has open to other hosts, but for torchrun's rendezvous."""
    others = [other for other in range(len(hosts)) if other != host]
    if not others:
        return []
    found = []
    said = hosts[host].run("ss", "-Htn", "state", "connected", *_to(others))
    for line in said.splitlines():
        # A socket that speaks IPv6 shows IPv4 addresses as [::ffff:10.77.0.101].
        plain = line.replace("[::ffff:", "").replace("]", "")
        state, _, unheard, local, peer = plain.split()[:5]
        is_rendezvous = f":{RENDEZVOUS_PORT}" in (local[-6:], peer[-6:])
        if not is_rendezvous and state != "TIME-WAIT":
            found.append(Connection(local, peer, state, int(unheard)))
    return found


def waiting(hosts: Sequence[Namespace], host: int, way: str) -> list[Connection]:
    """The connections over the host's link with bytes under way that a cut ``way`` keeps up."""
    found: list[Connection] = []
    if way in ("both", "out"):
        found += [each for each in connections(hosts, host) if each.unheard_bytes]
    if way in ("both", "in"):
        for other in range(len(hosts)):
            if other != host:
                theirs = connections(hosts, other)
                here = f"{address(host)}:"
                found += [c for c in theirs if c.unheard_bytes and c.peer.startswith(here)]
    return found


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
