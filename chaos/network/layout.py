"""Which host has which address: the plan of the network, as plain functions.

Guarantees: the order of the hosts is that of their addresses as text, because torchrun numbers its
agents so; the same host has the same address in every attempt. Torch-free.
"""

from __future__ import annotations

INTERFACE = "eth0"
"""The one interface of a host, beside its loopback."""

RENDEZVOUS_PORT = 29400
"""Where the agent of the first host serves torchrun's rendezvous, in a namespace of its own."""

WAYS = ("both", "out", "in")
"""What of a host's packets a cut loses: all, those that it sends, or those that are sent to it."""

HOSTS_MAX = 99
_FIRST = 101
_NETWORK = "10.77.0"


def address(host: int) -> str:
    """The IPv4 address of a host, which counts from 0 to ``HOSTS_MAX`` - 1."""
    return f"{_NETWORK}.{_FIRST + host}"


def port(host: int) -> str:
    """The name of the switch's port that the host's cable ends in."""
    return f"port{host}"
