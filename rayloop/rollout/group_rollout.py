"""Playing a group: the requests of its members, and the version that began each of them, as far as the driver knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rayloop.core.groups import Group, Member, Scored
from rayloop.core.types import RolloutRequest, Task, TrajectoryId, Version, derive
from rayloop.grpo.staleness import is_due
from rayloop.run.config import RunConfig


@dataclass(frozen=True)
class GroupRequest:
    """A group to play: its number, its task's index in the dataset, and how often that task was visited before."""

    number: int
    index: int
    visit: int

    def ids(self, size: int) -> list[TrajectoryId]:
        """Of its ``size`` trajectories."""
        return [TrajectoryId(self.number, sample) for sample in range(size)]


class Player(Protocol):
    """Plays and scores groups, whatever dies meanwhile (cluster/supervision/attempts.py)."""

    async def play(self, asked: Sequence[RolloutRequest], step: int, begins: Callable[[RolloutRequest], None]) -> list[Member]:
        """The members of a group. ``step``: the one that they are meant for. ``begins`` is called whenever an episode is let into
        the engines."""


def requests(config: RunConfig, task: Task, ids: Sequence[TrajectoryId], visit: int) -> list[RolloutRequest]:
    """The episodes of one group: what each samples follows from the run's seed, the task, the sample and the visit."""
    sampling = config.rollout.sampling.sampling()
    cohort = len(ids) if config.rollout.deterministic else None
    return [RolloutRequest(task, i, 0, derive(config.seed, task.id, i.sample, visit), sampling, cohort) for i in ids]


class GroupRollout:
    """Plays groups for the version that the engines serve. ``changed`` is called when an episode begins once more.

    An episode's staleness counts from its first token. The driver learns that token's version when the episode ends; until
    then it takes the version at which the episode was let into the engines, which is that one or an older one.
    """

    def __init__(self, config: RunConfig, changed: Callable[[], None]) -> None:
        self.config, self._changed = config, changed
        self.version = Version(0, 0)
        self._began: dict[int, dict[int, Version]] = {}
        self._versions: Counter[Version] = Counter()
        """How many of those episodes each version began: thousands are in flight, of a few versions."""

    async def play(self, request: GroupRequest, task: Task, player: Player) -> Group:
        """All members of a group. It counts as being played until ``forget``: filters and the reference come after."""
        asked = requests(self.config, task, request.ids(self.config.algorithm.group_size), request.visit)
        self._began[request.number] = {}
        members = await player.play(asked, self.version.step, self._begins)
        for member in members:
            self._ended(member)
        return Group(request.number, task, tuple(members))

    def _begins(self, request: RolloutRequest) -> None:
        if self._set(request.id, self.version):
            self._changed()

    def _ended(self, member: Member) -> None:
        self._set(member.summary.id, member.summary.first_version if isinstance(member.outcome, Scored) else None)

    def _set(self, id: TrajectoryId, version: Version | None) -> bool:
        """Which version began an episode; None: there is none to count. Returns whether there was one before."""
        began = self._began[id.group]
        if before := began.pop(id.sample, None):
            self._forget(before)
        if version is not None:
            began[id.sample] = version
            self._versions[version] += 1
        return before is not None

    def _forget(self, version: Version) -> None:
        self._versions[version] -= 1
        if not self._versions[version]:
            del self._versions[version]

    def any_due(self, training: Version, inherited: Mapping[int, int]) -> bool:
        """Whether a group holds what ``training`` is the last version to train on."""
        limit = self.config.algorithm.staleness.max_staleness
        return any(is_due(first, training, limit, inherited) for first in self._versions)

    def forget(self, request: int) -> None:
        """Count a group's episodes no longer."""
        for version in self._began.pop(request).values():
            self._forget(version)

    def clear(self) -> None:
        """Count no episode any longer."""
        self._began.clear()
        self._versions.clear()
