"""Replay of one stored success into a group of failures, as in ARPO.

arXiv:2505.16282; docs/algorithm.md, section 5.
"""

import random
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from rayloop.core.groups import Group, Member, Status, TrajectoryState, Unscored
from rayloop.core.types import TrajectoryId, derive
from rayloop.grpo.settings import ReplaySettings

REPLACED = Status(TrajectoryState.SURPLUS, "replaced_by_replay")


@dataclass(frozen=True)
class ReplayRules:
    """Which trajectories are stored, and which groups get one; the defaults are ARPO's.

    The original compares in single precision, where a reward of 0.1 is above the limit of 0.1.
    ``success_above=0.0999999`` stores it too.
    """

    capacity: int = 8
    """Stored successes per task, oldest out first."""
    success_above: float = 0.1
    """Trajectories with an environment result above this are stored."""
    max_std: float = 0.05
    """A group failed when the population std of its results is below this ..."""
    max_mean: float = 0.2
    """... and their mean below this."""


@dataclass(frozen=True)
class Injection:
    """The group, and the fresh member that a stored success replaced, if any; its status is set."""

    group: Group
    displaced: Member | None = None


class ReplayBuffer:
    """The last ``capacity`` successes of each task.

    It holds their payload references, so the payloads stay alive.
    """

    def __init__(
        self, settings: ReplaySettings, seed: int, rules: ReplayRules = ReplayRules()
    ) -> None:
        self._settings = settings
        self._seed = seed
        self._rules = rules
        self._stored: dict[str, deque[Member]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._stored.values()))

    def inject(self, group: Group) -> Injection:
        """Returns the group with a stored success as member 0 when all of it failed.

        The displaced member counts as ``surplus[replaced_by_replay]``, or as excluded if unscored.
        No member has an advantage or a status yet. The draw depends on (seed, task, group) and
        on the stored successes. The buffer does not change: ``store`` the original group once it is
        committed.
        """
        if not self._settings.on or not self._failed(group):
            return Injection(group)
        success = self._draw(group)
        if success is None:
            return Injection(group)
        # ARPO replaces the first member. Any would do: the scored ones all failed, and an unscored
        # one is not trained on.
        members = (replace(success, replayed=True), *group.members[1:])
        first = group.members[0]
        # The ledger counts an unscored member under the reason for which it has no reward.
        status = REPLACED
        if isinstance(first.outcome, Unscored):
            status = Status(TrajectoryState.EXCLUDED, str(first.outcome.kind))
        return Injection(
            replace(group, members=members, replay_of=success.summary.id),
            replace(first, status=status),
        )

    def store(self, group: Group) -> None:
        """Keep the fresh successes of ``group`` as it was before injection.

        They displace the oldest ones of its task.
        """
        if not self._settings.on:
            return
        for member in group.scored:
            if not member.replayed and _result(member) > self._rules.success_above:
                slots = self._stored.setdefault(group.task.id, deque(maxlen=self._rules.capacity))
                # Advantage and reference log-probs belong to the
                # step that trains, and are computed again then.
                slots.append(replace(member, credit=None, ref_logprobs=None))

    def forget(self, ids: Collection[TrajectoryId]) -> None:
        """Remove these trajectories, whose payloads are lost."""
        for task, members in self._stored.items():
            remaining = (member for member in members if member.summary.id not in ids)
            self._stored[task] = deque(remaining, members.maxlen)

    def _failed(self, group: Group) -> bool:
        results = [_printed_decimal(_result(member)) for member in group.scored]
        if not results:
            return False
        max_std = _printed_decimal(self._rules.max_std)
        max_mean = _printed_decimal(self._rules.max_mean)
        return statistics.pstdev(results) < max_std and statistics.mean(results) < max_mean

    def _draw(self, group: Group) -> Member | None:
        successes = list(self._stored.get(group.task.id, ()))
        if not successes:
            return None
        seed = derive(self._seed, "replay", group.task.id, group.number)
        return random.Random(seed).choice(successes)

    def stats(self) -> dict[str, Any]:
        """Returns the numbers of successes and tasks, and the statistics of each task.

        A task has its number of successes and the oldest and newest step.
        """
        if not self._settings.on:
            return {}
        tasks: dict[str, dict[str, int]] = {}
        for task, members in self._stored.items():
            if members:
                steps = [member.summary.first_version.step for member in members]
                tasks[task] = {
                    "stored": len(steps),
                    "oldest_step": min(steps),
                    "newest_step": max(steps),
                }
        return {"stored": len(self), "tasks": len(tasks), "per_task": tasks}

    def state(self) -> dict[str, tuple[Member, ...]]:
        """Returns the stored members per task, oldest first, with payloads as references.

        A checkpoint writes the payloads.
        """
        return {task: tuple(members) for task, members in self._stored.items()}

    def restore(self, state: Mapping[str, Sequence[Member]]) -> None:
        """Restore the buffer from ``state``, whose payload references belong to this process."""
        self._stored = {
            task: deque(members, maxlen=self._rules.capacity) for task, members in state.items()
        }


def _result(member: Member) -> float:
    """Returns the environment's own result of a scored member, else its reward."""
    result = member.summary.env_result
    return member.reward if result is None else result


def _printed_decimal(number: float) -> Decimal:
    """Returns the printed number as a decimal: 0.05 and 0.15 are then exactly 0.1 apart."""
    return Decimal(repr(float(number)))
