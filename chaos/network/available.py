"""Whether this machine can be several hosts: asked before anything is launched."""

from __future__ import annotations

import os
import subprocess

from ..errors import UsageError
from .layout import HOSTS_MAX
from .namespaces import PATH, program

_PROGRAMS = {
    "ip": "iproute2",
    "ss": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}
_TRIAL = (
    "ip link add switch type bridge && ip link add port type veth peer name eth0 && "
    "tc qdisc add dev port root pfifo limit 0"
)


def require_hosts(hosts: int) -> None:
    """Whether ``hosts`` hosts can be made here, which is tried.

    Raises:
        UsageError: they cannot, with what is missing.
    """
    if not 2 <= hosts <= HOSTS_MAX:
        raise UsageError(
            f"--chaos-launcher hosts joins 2 to {HOSTS_MAX} hosts: say how many by --chaos-nodes, "
            f"which is {hosts}"
        )
    if os.geteuid() != 0:
        raise UsageError("--chaos-launcher hosts needs root, to make network namespaces")
    for name, package in _PROGRAMS.items():
        if program(name) is None:
            raise UsageError(f"--chaos-launcher hosts needs {name} ({package} on Debian)")
    # In a namespace of its own, which is gone with the command.
    done = subprocess.run(
        ["unshare", "--net", "--", "sh", "-c", _TRIAL],
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": PATH},
        check=False,
    )
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise UsageError(
            "--chaos-launcher hosts needs network namespaces, veth, bridge and pfifo, which this "
            f"machine does not give: {said}"
        )
