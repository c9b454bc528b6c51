"""A clock that a test moves: what a thread did is then known exactly."""

from __future__ import annotations

from seatrial.recovery.collectives.clock import Reading, ThreadClock


class ScriptedClock(ThreadClock):
    """At 0 s; the thread is the one that makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.close()
        self.knows_starved = True
        self.now = Reading(0.0, 0.0, 0.0)
        self.others = 0.0

    def read(self) -> Reading:
        return self.now

    def starved(self) -> float:
        return self.now.starved

    def others_starved(self) -> float:
        return self.others

    def computes(self, seconds: float) -> None:
        wall, cpu, starved = self.now
        self.now = Reading(wall + seconds, cpu + seconds, starved)

    def starves(self, seconds: float) -> None:
        wall, cpu, starved = self.now
        self.now = Reading(wall + seconds, cpu, starved + seconds)

    def sleeps(self, seconds: float) -> None:
        wall, cpu, starved = self.now
        self.now = Reading(wall + seconds, cpu, starved)
