"""Trajectories that end without a reward: how many, and whether it hits some of them more than others.

Leaving out what a grader failed on is harmless only while the failures are few and do not depend on what is scored.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from pydantic import Field

from rayloop.core.config import Settings
from rayloop.core.types import Member, Scored


class UnscoredAlarm(Settings):
    """When to raise an alarm about trajectories that were played but got no reward. It changes nothing else."""

    window: int = Field(512, ge=2)
    """Trajectories that are looked back upon."""
    share: float = Field(0.05, ge=0, le=1)
    """Alarm when more than this share of them has no reward."""
    correlation: float = Field(0.3, ge=0, le=1)
    """Alarm when having none is correlated this much with the length or with being of one data source."""
    least: int = Field(8, ge=2)
    """No alarm before this many are without a reward."""


class UnscoredWatch:
    """``observe`` each finished group's members; it returns the alarms that were not true before, in words."""

    def __init__(self, settings: UnscoredAlarm) -> None:
        self.settings = settings
        self._seen: deque[tuple[str, int, str]] = deque(maxlen=settings.window)
        self._active: set[str] = set()

    def observe(self, members: Iterable[Member]) -> list[str]:
        """Members that were never played (length 0) say nothing about the reward."""
        for member in members:
            if member.summary.length and not member.replayed:
                kind = "" if isinstance(member.outcome, Scored) else str(member.outcome.kind)
                self._seen.append((member.summary.source, member.summary.length, kind))
        now = self._alarms()
        fresh = [text for name, text in now.items() if name not in self._active]
        self._active = set(now)
        return fresh

    def _alarms(self) -> dict[str, str]:
        unscored = [float(bool(kind)) for _, _, kind in self._seen]
        count, total = int(sum(unscored)), len(unscored)
        if count < self.settings.least:
            return {}
        found = {}
        if count > self.settings.share * total:
            kinds = Counter(kind for _, _, kind in self._seen if kind)
            why = ", ".join(f"{kind} {n}" for kind, n in kinds.most_common())
            found["share"] = f"{count} of the last {total} trajectories have no reward ({why})"
        lengths = [float(length) for _, length, _ in self._seen]
        if abs(r := correlation(unscored, lengths)) > self.settings.correlation:
            found["length"] = f"{'longer' if r > 0 else 'shorter'} trajectories have no reward more often (r = {r:.2f})"
        for source in dict.fromkeys(source for source, _, _ in self._seen):
            if (r := correlation(unscored, [float(s == source) for s, _, _ in self._seen])) > self.settings.correlation:
                found[f"source {source}"] = f"trajectories of {source or 'no source'} have no reward more often (r = {r:.2f})"
        return found


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Pearson's coefficient, 0 when one of the two does not vary."""
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    product = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    spread = sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b)
    return product / math.sqrt(spread) if spread > 0 else 0.0
