"""The links between hosts: making them, cutting them, and seeing which do not carry.

One bridge is the switch. A host's interface is one end of a veth pair, the other its port, and
between port and switch is a cable: a bridge of its own, with a veth pair to the switch.

Guarantees: a cut holds when `Links.cut` returns. A link that is down is down at the switch, so a
host keeps its address and its routes, as when a cable is pulled. What is lost one way is dropped by
a queue of length 0 in the middle of the cable, silently, as in a network. At the host's own end
its kernel would know: it would try again every half second and give up after 8, not 15 minutes.
A slow link is one for the job: what torchrun's own rendezvous sends passes by the queue that is
slow, because how long that waits says nothing of the job.
"""

from __future__ import annotations

import json
from typing import Any

from .layout import INTERFACE, RENDEZVOUS_PORT, address, port
from .namespaces import Namespace, enter_new_namespace

_BRIDGE = "switch"
_DROPPING = "pfifo limit 0"
_SHAPE = "burst 4kb limit 16mb"
# A class that is as fast as it gets, in which there is the slow queue; 1:0 is past all classes.
_SORTED = (
    "qdisc add dev {0} root handle 1: htb default 2",
    "class add dev {0} parent 1: classid 1:2 htb rate 30gbit burst 1mb cburst 1mb quantum 65536",
    "filter add dev {0} parent 1: protocol ip u32 match ip sport {1} 0xffff flowid 1:0",
    "filter add dev {0} parent 1: protocol ip u32 match ip dport {1} 0xffff flowid 1:0",
)


class Links:
    """The switch and ``hosts`` hosts. This process ends up in the switch's namespace."""

    def __init__(self, hosts: int) -> None:
        self.hosts = [enter_new_namespace() for _ in range(hosts)]
        self._switch = enter_new_namespace()
        self._slow: set[int] = set()
        made = [f"link add {_BRIDGE} type bridge", f"link set {_BRIDGE} up"]
        for host, namespace in enumerate(self.hosts):
            cable, near, far = f"cable{host}", _near(host), f"far{host}"
            made += [
                f"link add {cable} type bridge",
                f"link set {cable} up",
                f"link add {port(host)} type veth peer name {INTERFACE} netns {namespace.path}",
                f"link add {near} type veth peer name {far}",
                f"link set {port(host)} master {cable} up",
                f"link set {near} master {cable} up",
                f"link set {far} master {_BRIDGE} up",
            ]
        _ip(self._switch, made)
        for host, namespace in enumerate(self.hosts):
            own = f"addr add {address(host)}/24 dev {INTERFACE}"
            _ip(namespace, ["link set lo up", own, f"link set {INTERFACE} up"])

    def cut(self, host: int, way: str) -> None:
        """Lose the packets of ``host`` that go ``way``, one of `layout.WAYS`. Twice is fine."""
        if way == "both":
            _ip(self._switch, [f"link set {port(host)} down"])
        else:
            self._tc(f"qdisc replace dev {_queue(host, way)} root {_DROPPING}")

    def heal(self, host: int, way: str) -> None:
        """Undo `cut`."""
        if way == "both":
            _ip(self._switch, [f"link set {port(host)} up"])
        else:
            self._tc(f"qdisc del dev {_queue(host, way)} root")

    def throttle(self, host: int, rate: float) -> None:
        """Let ``rate`` bytes a second through each way; what is more waits its turn."""
        bits = max(8, round(8 * rate))
        for namespace, device in self._ends(host):
            if host not in self._slow:
                for command in _SORTED:
                    namespace.run("tc", *command.format(device, RENDEZVOUS_PORT).split())
            shaped = f"qdisc replace dev {device} parent 1:2 handle 2: tbf rate {bits}bit {_SHAPE}"
            namespace.run("tc", *shaped.split())
        self._slow.add(host)

    def held_back(self, host: int) -> int:
        """How often a packet of a throttled link had to wait, both ways together."""
        said = [
            ns.run("tc", *f"-j -s qdisc show dev {dev}".split()) for ns, dev in self._ends(host)
        ]
        queues = [each for text in said for each in json.loads(text)]
        return sum(each["overlimits"] for each in queues if each["kind"] == "tbf")

    def broken(self) -> dict[int, list[str]]:
        """The ways in which a host's link does not carry, as the kernel shows them."""
        ports = {each["ifname"]: each for each in json.loads(self._switch.run("ip", "-j", "link"))}
        found: dict[int, list[str]] = {}
        for host in range(len(self.hosts)):
            ways = [way for way in ("out", "in") if self._drops(host, way)]
            if "UP" not in ports[port(host)]["flags"]:
                ways.insert(0, "both")
            if ways:
                found[host] = ways
        return found

    def _ends(self, host: int) -> tuple[tuple[Namespace, str], ...]:
        """Where a link is throttled, apart from where it drops: what the host sends, and gets."""
        return (self.hosts[host], INTERFACE), (self._switch, f"far{host}")

    def _drops(self, host: int, way: str) -> bool:
        queues: list[dict[str, Any]] = json.loads(
            self._tc(f"-j qdisc show dev {_queue(host, way)}")
        )
        return any(each["kind"] == "pfifo" and each.get("root") for each in queues)

    def _tc(self, command: str) -> str:
        return self._switch.run("tc", *command.split())


def _near(host: int) -> str:
    return f"near{host}"


def _queue(host: int, way: str) -> str:
    """The device in whose queue packets wait that go ``way``."""
    return _near(host) if way == "out" else port(host)


def _ip(namespace: Namespace, commands: list[str]) -> None:
    namespace.run("ip", "-batch", "-", said="\n".join(commands) + "\n")
