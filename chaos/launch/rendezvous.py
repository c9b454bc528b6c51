"""The store by which the ranks of one attempt find each other: torch's file store, asked sooner.

Guarantees: it is `torch.distributed.FileStore` in all but this: whoever waits for a key looks for
it every half millisecond at first, where torch sleeps for 10 ms. A group that gloo connects waits
for the addresses of its peers, so each group is made 10 ms sooner.

Does not: list its keys through another store, as torch lets no store in Python do.

For gloo alone, which asks its store while it connects, in the thread that makes the group. NCCL
asks from threads of its own, also while the interpreter ends, and must not come to Python for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from seatrial.recovery.exchange import await_keys


class EagerFileStore(Store):
    """Asks ``file``, a `torch.distributed.FileStore`.

    C++ that uses it holds on to half of it: whoever makes one keeps it for as long as the groups.

    Raises:
        torch.distributed.DistStoreError: from `wait` and `get`: a key did not come in ``timeout``.
    """

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file
        self._clones: list[EagerFileStore] = []

    def set(self, key: str, value: str) -> None:
        self._file.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        found: bytes = self._file.get(key)
        return found

    def add(self, key: str, value: int) -> int:
        total: int = self._file.add(key, value)
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        found: bytes = self._file.compare_set(key, expected, desired)
        return found

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._file.check(keys))

    def delete_key(self, key: str) -> bool:
        return bool(self._file.delete_key(key))

    def num_keys(self) -> int:
        return int(self._file.num_keys())

    def list_keys(self) -> list[str]:
        return list(self._file.list_keys())

    def clone(self) -> EagerFileStore:
        self._clones.append(EagerFileStore(self._file.clone()))
        return self._clones[-1]

    # C++ asks for these by its own names.
    deleteKey, getNumKeys = delete_key, num_keys

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit: timedelta = timeout or self.timeout  # type: ignore[attr-defined]
        if missing := await_keys(self._file, list(keys), limit.total_seconds()):
            raise dist.DistStoreError(f"no rank has set {', '.join(missing)} in {limit}")
