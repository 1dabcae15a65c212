"""Episodes that infrastructure took, by cause, node and server.

Each attempt is an episode here: one that is played again was lost, and cost its time.
"""

import re
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from rayloop.core.failures import OF_INFRASTRUCTURE, Failure
from rayloop.core.groups import Outcome, Unscored, UnscoredKind

WINDOW_EPISODES = 512
"""Episodes of which the alarm takes the share."""
REWARD_LOST = (UnscoredKind.REWARD_UNAVAILABLE, UnscoredKind.PAYLOAD_LOST)
"""Why an episode that was played is lost before it has a reward."""


@dataclass(frozen=True)
class _Ended:
    """An episode that ended; ``cause``: "" for one that infrastructure did not take."""

    node: str
    cause: str = ""
    server: str = ""

    @property
    def parts(self) -> dict[str, str]:
        """What is known of the loss."""
        known = {"cause": self.cause, "node": self.node, "server": self.server}
        return {part: name for part, name in known.items() if name}


class LostEpisodes:
    """Counts the episodes of a run, held-out ones too, and those that infrastructure took."""

    def __init__(self) -> None:
        self._recent: deque[_Ended] = deque(maxlen=WINDOW_EPISODES)
        self._since_step: list[_Ended] = []
        self._last_why = ""

    def failed(self, failure: Failure, node: str) -> None:
        """An attempt failed on an actor of ``node``. Bad data counts as no loss."""
        cause = str(failure.cause) if failure.cause in OF_INFRASTRUCTURE else ""
        self._count(_Ended(_label(node), cause, _label(failure.server)), failure.why)

    def played(self, outcome: Outcome, node: str) -> None:
        """An episode was played on an actor of ``node``, and the reward gave ``outcome``."""
        is_lost = isinstance(outcome, Unscored) and outcome.kind in REWARD_LOST
        cause = str(outcome.kind) if isinstance(outcome, Unscored) and is_lost else ""
        self._count(_Ended(_label(node), cause), outcome.reason)

    def take(self) -> dict[str, float]:
        """The metrics of the episodes since the last call; empty without any."""
        ended = self._since_step
        self._since_step = []
        if not ended:
            return {}
        lost = [episode for episode in ended if episode.cause]
        metrics = {"lost/episodes": len(lost) / len(ended)}
        for (part, name), count in _counts(lost).items():
            metrics[f"lost/{part}/{name}"] = count / len(ended)
        return metrics

    @property
    def recent(self) -> tuple[int, int]:
        """How many of the last episodes were lost, and how many ended."""
        return sum(episode.cause != "" for episode in self._recent), len(self._recent)

    def sentence(self) -> str:
        """Say how many of the last episodes were lost, most often to what, and the last reason."""
        lost_count, total = self.recent
        counts = _counts(episode for episode in self._recent if episode.cause)
        places = [f"{part} {name} {count}" for (part, name), count in counts.most_common(5)]
        return (
            f"{lost_count} of the last {total} episodes were lost to infrastructure"
            f" ({', '.join(places)}), the last one: {self._last_why}"
        )

    def _count(self, episode: _Ended, why: str) -> None:
        self._recent.append(episode)
        self._since_step.append(episode)
        if episode.cause:
            self._last_why = why


def _counts(lost: Iterable[_Ended]) -> Counter[tuple[str, str]]:
    """How many lost episodes have each cause, node and server."""
    counts: Counter[tuple[str, str]] = Counter()
    for episode in lost:
        counts.update(episode.parts.items())
    return counts


def _label(name: str) -> str:
    """A part of a metric's name: of an address host and port, without user and password."""
    host = urlsplit(name).netloc if "://" in name else name
    return re.sub(r"[^\w.:-]+", "_", host.rpartition("@")[2]).strip("_")
