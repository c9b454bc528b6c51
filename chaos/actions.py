"""Every kind of fault: what it does, at which events, and which options it takes.

Five families: what happens to a rank's process or machine, to a host and its link, to the newest
checkpoint at rest, to a single operation of the storage or a record of the data, and to a
collective or a message.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from .events import EVENTS, STORAGE
from .network.layout import WAYS
from .powerloss.volatile import SURVIVES

CHANGES = ("write", "commit", "publish", "rename", "delete")
DATA = ("read", "write", "commit", "publish")
EVERY_OPERATION = tuple(
    event.name.removeprefix(STORAGE) for event in EVENTS if event.stage == "storage"
)
ERRORS = {
    name: getattr(errno, name)
    for name in (
        *("EIO", "ENOSPC", "EDQUOT", "EACCES", "EROFS", "ETIMEDOUT", "ESTALE", "ECONNRESET"),
    )
} | {"SlowDown": errno.EBUSY}
"""What ``fail`` may raise, by name; ``SlowDown`` is a 503 of S3, as s3fs translates it."""


@dataclass(frozen=True)
class Action:
    """One kind of fault: what it does, and which options besides the common ones it takes."""

    name: str
    meaning: str
    options: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    """The storage operations that it can alter; empty for what alters none."""


_PROCESS = (
    Action("kill", "SIGKILL: the process is gone at once"),
    Action("stop", "SIGSTOP: the process freezes; resume=SECONDS continues it", ("resume",)),
    Action("terminate", "SIGTERM, then SIGKILL after grace=SECONDS: a preemption", ("grace",)),
    Action("exit", "the process leaves with code=N and no clean-up", ("code",)),
    Action("raise", "an exception is thrown into the job"),
    Action("oom", "memory runs out: RLIMIT_AS is lowered and exhausted"),
    Action("powercut", "the machine loses power: its ranks die, and what was not made durable may "
           "be lost, as survives= says", ("survives",)),
    Action("delay", "the rank, or an operation of its storage, takes seconds=S longer",
           ("seconds", "tail", "times"), EVERY_OPERATION),
    Action("spoil", "one bit of the record flips that the rank has read; record=N only of that one",
           ("record",)),
)  # fmt: skip

_HOST = (
    Action(
        "partition",
        "a host's link is cut, or loses one way; heal=SECONDS mends it",
        ("way", "heal"),
    ),
    Action(
        "throttle",
        "a host's link carries rate=N bytes a second each way, until the attempt ends",
        ("rate",),
    ),
    Action("reset", "all connections of a host to others are reset"),
    Action("crash", "all processes of a host are killed at once, torchrun's agent too"),
)

_AT_REST = (
    Action("tear", "the rank's file in the newest checkpoint loses its second half", ("part",)),
    Action("flip", "one bit of the rank's file in the newest checkpoint flips", ("part",)),
    Action("remove", "the rank's file in the newest checkpoint disappears", ("part",)),
    Action("swap", "the rank's file in the newest checkpoint and the next rank's change places",
           ("part",)),
    Action("rollback", "the rank's file in the newest checkpoint becomes the previous one's",
           ("part",)),
)  # fmt: skip

_OPERATION = (
    Action("fail", "a storage operation fails with error=NAME (when=after: it took effect)",
           ("error", "times"), EVERY_OPERATION),
    Action("lose", "a storage operation is acknowledged and never carried out",
           ("times",), CHANGES),
    Action("short", "only the first keep=BYTES of a write arrive (half of it)",
           ("keep", "times"), ("write", "commit", "publish")),
    Action("corrupt", "one bit flips on the way to or from the storage", ("times",), DATA),
    Action("stale", "a rank is served what it saw last, or nothing",
           ("times",), ("read", "list", "stat")),
    Action("late", "a storage operation is acknowledged, and done hold=N operations later (1)",
           ("hold", "times"), CHANGES),
    Action("slow", "bytes move at rate=N a second", ("rate", "times"), DATA),
)  # fmt: skip

_COLLECTIVE = (
    Action("reorder", "a call is made after the next one of its kind", ("across",)),
    Action("skip", "a call is not made, and its tensors stay as they are"),
    Action("duplicate", "a call is made twice"),
    Action("wrong-shape", "a call is made with another number of elements"),
    Action("wrong-dtype", "a call is made with another dtype", ("size",)),
    Action("wrong-reduction", "a call is made with another reduction"),
    Action("wrong-root", "a call is made with the next rank as its root"),
    Action("wrong-group", "a call is made in another group of the rank"),
    Action("garble", "one element of what a call carries changes", ("of", "to")),
    Action("drop", "a call is not made, and whoever waits for it waits for ever"),
)

_ALL = (*_PROCESS, *_HOST, *_AT_REST, *_OPERATION, *_COLLECTIVE)
ACTIONS = {action.name: action for action in _ALL}
"""Every action by name."""
NETWORK = tuple(action.name for action in _HOST)
"""Actions on a whole host, which the switch between hosts carries out."""

DAMAGE = tuple(action.name for action in _AT_REST)
LIES = ("lose", "short", "corrupt", "stale", "late")
"""Alterations that the job is not told of."""
INSIDE = ("raise", "exit", "oom")
"""What only the struck process can do to itself."""
BENDING = tuple(action.name for action in _COLLECTIVE)
"""Actions on a collective or a message."""
HANGING = tuple(name for name in BENDING if name != "garble")
"""Those after which ranks may wait for each other for ever: of different calls, or of one too many.
What is garbled comes and goes as it did."""

PARTS = ("shard", "objects", "manifest")
CHOICES: dict[str, tuple[str, ...]] = {
    "part": PARTS,
    "survives": SURVIVES,
    "error": tuple(ERRORS),
    "size": ("same", "other"),
    "of": ("result", "input"),
    "to": ("bit", "nan", "inf"),
    "way": WAYS,
}
"""What the options may be that have few values."""
OWN_OPTIONS = tuple(dict.fromkeys(o for action in ACTIONS.values() for o in action.options))
"""Options that only some actions take."""

ALWAYS = 0
"""``times=always``."""
