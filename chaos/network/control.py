"""How the switch is spoken to, by ranks and by the custodian: one JSON line there, one back.

Torch-free, and apart from the switch, so that a rank needs nothing of it but this.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from ..errors import LaunchError

SOCKET = "network.sock"
"""The switch's socket, in the attempt's directory. Paths are seen from every network namespace."""

_ANSWER_S = 30.0


def ask(directory: Path, **request: object) -> dict[str, object]:
    """Have the switch of the attempt in ``directory`` do something, and wait until it is done.

    Raises:
        OSError: there is no switch.
        LaunchError: it could not; the message says why.
    """
    with socket.socket(socket.AF_UNIX) as speaker, short_path(directory) as near:
        speaker.settimeout(_ANSWER_S)
        speaker.connect(f"{near}/{SOCKET}")
        speaker.sendall(json.dumps(request).encode() + b"\n")
        said = b"".join(iter(lambda: speaker.recv(1 << 16), b""))
    if not said:
        raise LaunchError("the switch between the hosts ended before it had answered")
    answer: dict[str, object] = json.loads(said)
    if "failed" in answer:
        raise LaunchError(f"the network between the hosts: {answer['failed']}")
    return answer


@contextlib.contextmanager
def short_path(directory: Path) -> Iterator[str]:
    """A path of the directory that fits the 108 bytes of a socket's address, however deep it is."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
