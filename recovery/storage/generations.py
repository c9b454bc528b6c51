"""How one step stands in an object store: its manifests, one for each generation, and its attempts.

There is no rename and no descriptor to hold there, so an attempt that was taken for dead could
publish after its files were collected. It cannot, because of generations:

- The manifest of generation 0 is ``manifest.json``, that of generation 3 ``manifest-3.json``. An
  attempt belongs to the first generation that has no manifest when it begins; the number is in its
  name (``attempt-3_<id>``). It publishes by creating that one manifest exclusively.
- Before files of an unpublished attempt are deleted, its generation is closed: a tombstone is
  created exclusively in the place of the manifest. Either that succeeds, and no attempt of the
  generation can publish any more; or somebody has published, and nothing is deleted.
- A published step is deleted, or set aside, by replacing its manifest with a tombstone.

So at most one generation has a manifest, and every older one has a tombstone. Tombstones stay: who
they keep out may come at any time.

Does not: read or write; whoever calls does. Torch-free; called by `seatrial.recovery.storage`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .names import ATTEMPT_PREFIX, VERIFIED, step_name

__all__ = ["COLLECTED", "QUARANTINED", "StepView", "manifest_name", "tombstone_of"]

COLLECTED = b'{"seatrial": "collected"}\n'
"""Takes the place of the manifest of what was deleted."""

QUARANTINED = b'{"seatrial": "quarantined"}\n'
"""Takes the place of the manifest of what was set aside; its files stay."""

_SIZES = {len(COLLECTED), len(QUARANTINED)}
_MANIFEST = re.compile(r"manifest(?:-([1-9][0-9]{0,8}))?\.json")
_ATTEMPT = re.compile(rf"{ATTEMPT_PREFIX}(?:([1-9][0-9]{{0,8}})_)?[A-Za-z0-9]+")


def manifest_name(step: int, generation: int) -> str:
    """Where the manifest of that generation is, relative to the store."""
    return f"{step_name(step)}/manifest{f'-{generation}' if generation else ''}.json"


def tombstone_of(size_bytes: int, read: Callable[[int], bytes]) -> bytes | None:
    """The tombstone that is in the place of a manifest; None if it is no tombstone."""
    if size_bytes not in _SIZES:
        return None
    content = read(size_bytes)
    return content if content in (COLLECTED, QUARANTINED) else None


@dataclass
class StepView:
    """A step as it was listed. ``kept``: generations whose files are in quarantine."""

    step: int
    live: int | None = None
    open_generation: int = 0
    kept: set[int] = field(default_factory=set)
    attempts: dict[str, list[str]] = field(default_factory=dict)
    noted: bool = False

    @classmethod
    def of(
        cls,
        step: int,
        sizes: Mapping[str, int],
        tombstone: Callable[[str, int], bytes | None],
    ) -> StepView:
        """What the objects ``sizes`` of ``step`` say; ``tombstone(name, size)`` looks into one."""
        view = cls(step)
        for name, size_bytes in sorted(sizes.items()):
            first, _, rest = name.removeprefix(f"{step_name(step)}/").partition("/")
            manifest = _MANIFEST.fullmatch(first)
            if rest:
                view.attempts.setdefault(first, []).append(name)
            elif first == VERIFIED:
                view.noted = True
            elif manifest:
                generation = int(manifest[1] or 0)
                view.open_generation = max(view.open_generation, generation + 1)
                found = tombstone(name, size_bytes)
                if found is None:
                    view.live = max(generation, view.live or 0)
                elif found == QUARANTINED:
                    view.kept.add(generation)
        return view

    @property
    def has_files(self) -> bool:
        """Whether there is more than tombstones and what is in quarantine."""
        return self.live is not None or bool(self.deletable_attempts(self.open_generation))

    def generation_of(self, name: str) -> int | None:
        """The generation of the attempt that has the object ``name``; None if it is none."""
        attempt, separator, _ = name.removeprefix(f"{step_name(self.step)}/").partition("/")
        match = _ATTEMPT.fullmatch(attempt)
        return int(match[1] or 0) if match and separator else None

    def deletable_attempts(self, upto: int) -> dict[str, list[str]]:
        """Attempts of generations up to ``upto`` that are not in quarantine, and their objects."""
        return {
            attempt: names
            for attempt, names in self.attempts.items()
            if (generation := self.generation_of(names[0])) is not None
            and generation <= upto
            and generation not in self.kept
        }

    def deletable(self, upto: int) -> list[str]:
        """The objects of these attempts, and the note on the step."""
        names = [name for each in self.deletable_attempts(upto).values() for name in each]
        if self.noted and (names or self.live is not None):
            names.append(f"{step_name(self.step)}/{VERIFIED}")
        return names
