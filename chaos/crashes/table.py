"""A counterexample as text: the operations before the crash, and what was left of them."""

from __future__ import annotations

from .explore import Counterexample
from .operations import Operation

__all__ = ["table"]

_REMOVING = ("unlink", "rmdir", "delete")


def table(counterexample: Counterexample, *, context: int = 12) -> str:
    """The last ``context`` operations before the crash by rank, and what recovery found."""
    shown = [o for o in counterexample.done if o.kind not in ("hear", "answer")]
    lines = [f"{counterexample.reason}", "", "rank  operation before the crash"]
    if len(shown) > context:
        lines.append(f"   …  {len(shown) - context} operations")
    lines += [f"{operation.rank:>4}  {operation}" for operation in shown[-context:]]
    lines += ["", "what was left         of"]
    whole = 0
    for path, content in sorted(counterexample.found.items()):
        left, is_whole = _left(path, content, shown)
        whole += is_whole
        if not is_whole:
            lines.append(f"{left:<20}  {path}")
    lines += [
        f"{'nothing':<20}  {path}" for path in counterexample.missing if _is_lost(path, shown)
    ]
    lines += [f"{'not there yet':<20}  {path}" for path in counterexample.later]
    return "\n".join([*lines, f"{'all':<20}  {whole} other files that recovery read"])


def _is_lost(path: str, done: list[Operation]) -> bool:
    """Whether the path was there when the crash came."""
    last = next((o for o in reversed(done) if path in (o.path, o.target) and _renames(o)), None)
    return last is not None and (last.target or last.path) == path and last.kind not in _REMOVING


def _renames(operation: Operation) -> bool:
    return operation.kind not in ("write", "truncate", "fsync", "acknowledge")


def _left(path: str, content: bytes | None, done: list[Operation]) -> tuple[str, bool]:
    if content is None:
        return "directory", True
    puts = [o for o in done if o.kind in ("put", "put new") and o.path == path]
    if puts:
        is_last = content == puts[-1].data
        return f"{len(content)} bytes" if is_last else "another version", is_last
    nodes = {o.node for o in done if path in (o.path, o.target)}
    writes = [o for o in done if o.node in nodes and o.kind == "write"]
    if not writes:
        return f"{len(content)} bytes", bool(content)
    length = max(o.offset + len(o.data) for o in writes)
    kind = " of zeros" if content and not any(content) else ""
    return f"{len(content)} of {length} bytes{kind}", len(content) == length and not kind
