"""One state that a crash could leave, of which more and more is decided while recovery looks.

Guarantees: whatever is decided is consistent with all that was decided before; every other way to
decide is in `Choices.alternatives`, as the choices that lead to it, except for those that differ
from one that is tried by a permutation of symmetric ranks alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from .disk import Disk, Option
from .symmetry import Order, Symmetry

__all__ = ["Choices", "Superfluous"]


class Superfluous(BaseException):
    """The state is another one with symmetric ranks exchanged; raised through recovery."""


class Choices:
    """What is decided so far: first ``choices``, then whatever comes first."""

    def __init__(self, disk: Disk, symmetry: Symmetry, choices: tuple[int, ...]) -> None:
        self.given = disk.anything
        self.alternatives: list[tuple[int, ...]] = []
        self.is_superfluous = False
        self._order = Order(symmetry)
        self._choices = choices
        self._taken: list[int] = []

    def choose(self, options: Sequence[Option], path: str) -> object:
        """Decide what is found at ``path``, and assume what must be so for that.

        Raises:
            Superfluous: every option leads to a state that is tried elsewhere.
        """
        allowed = options
        if self._order.concerns(path):
            allowed = [each for each in options if self._order.allows(path, each.token)]
        if not allowed:
            self.is_superfluous = True
            raise Superfluous
        choice = 0
        if len(allowed) > 1:
            depth = len(self._taken)
            if depth < len(self._choices):
                choice = self._choices[depth]
            else:
                taken = tuple(self._taken)
                self.alternatives += [(*taken, other) for other in range(1, len(allowed))]
            self._taken.append(choice)
        self._order.note(path, allowed[choice].token)
        self.given = allowed[choice].assumptions
        return allowed[choice].found

    def pass_over(self, path: str) -> None:
        """Note that nothing is left to be decided at ``path``."""
        self._order.close(path)

    def stands_for(self) -> int:
        """How many states this is, ranks exchanged, once everything is decided."""
        return self._order.permutations()
