"""Staleness (docs/algorithm.md, section 7): how far generation may run ahead of training, bounded
at admission.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from rayloop.core.groups import Group, Status, TrajectoryState
from rayloop.core.types import Version

NO_LINEAGES: Mapping[int, int] = MappingProxyType({})


def lag(version: Version, training: Version) -> int:
    """Optimizer steps between the weights that sampled a trajectory and those that will train on
    it. Raises ValueError for a version from the future. Lineages are not compared; ``is_stale``
    does.
    """
    if version.step > training.step:
        raise ValueError(f"version {version} is ahead of the trainer's {training}")
    return training.step - version.step


def is_stale(
    first: Version,
    training: Version,
    max_staleness: int,
    inherited: Mapping[int, int] = NO_LINEAGES,
) -> bool:
    """Whether a trajectory that ``first``, its oldest version, began must not be trained by
    ``training``. A version of another lineage is stale, unless ``inherited`` (lineage -> step of
    the checkpoint from which the present one was restored) has it.
    """
    # After a restore the weights of later steps are others, though their numbers come again.
    if first.lineage != training.lineage and first.step > inherited.get(first.lineage, -1):
        return True
    return lag(first, training) > max_staleness


def is_due(
    first: Version,
    training: Version,
    max_staleness: int,
    inherited: Mapping[int, int] = NO_LINEAGES,
) -> bool:
    """Whether ``training`` is the last version that may train on a trajectory that ``first`` began."""
    stale_for = partial(is_stale, first, max_staleness=max_staleness, inherited=inherited)
    return stale_for(Version(training.lineage, training.step + 1)) and not stale_for(training)


def expired(
    group: Group, training: Version, max_staleness: int, inherited: Mapping[int, int] = NO_LINEAGES
) -> Group:
    """Returns the group, its members that are too old for ``training`` marked stale; replayed ones
    have their own age limit.
    """
    old = {
        i: replace(member, status=Status(TrajectoryState.STALE))
        for i, member in enumerate(group.members)
        if member.kept
        and not member.replayed
        and is_stale(member.summary.first_version, training, max_staleness, inherited)
    }
    return group.map(old) if old else group


def began(group: Group) -> float:
    """Returns the step of the oldest version that sampled a turn of a kept member; infinite when
    all kept ones are replayed.
    """
    # Replayed members are old by design, and would make every such group the oldest.
    return min(
        (m.summary.first_version.step for m in group.kept if not m.replayed), default=math.inf
    )


def open_slots(
    max_staleness: int, target: int, ready: int, in_flight: int, acceptance: float
) -> int:
    """Returns how many more trajectories may start: ``(max_staleness + 1) * target - (ready +
    acceptance * in_flight)``, at least 0: ``target`` per step, ``ready`` survivors, ``in_flight``
    unfiltered. Raises ValueError unless 0 < acceptance <= 1.
    """
    if not 0 < acceptance <= 1:
        raise ValueError(
            f"an acceptance rate of {acceptance} does not bound what is in flight: it must be in"
            " (0, 1]"
        )
    # The share is rounded up, so that what is in flight never exceeds the bound by a fraction.
    return max(0, (max_staleness + 1) * target - ready - math.ceil(in_flight * acceptance))


class AcceptanceRate:
    """The share of finished trajectories that survive the filters: an exponential average that
    starts at 1. ``memory`` is its time constant in trajectories; ``floor`` bounds what is in flight
    when nothing survives (1 / max_generation_batches).
    """

    def __init__(self, memory: float, floor: float) -> None:
        if not (memory > 0 and 0 < floor <= 1):
            raise ValueError(
                f"memory must be positive and floor in (0, 1], not {memory} and {floor}"
            )
        self._memory, self._floor, self._rate = memory, floor, 1.0

    @property
    def value(self) -> float:
        """The share, at least ``floor``."""
        return max(self._floor, self._rate)

    def observe(self, survivors: int, finished: int) -> None:
        """Count ``finished`` trajectories (any number of groups), ``survivors`` of which were kept."""
        if not 0 <= survivors <= finished:
            raise ValueError(f"{survivors} survivors of {finished} finished trajectories")
        if finished:
            # The weight follows from the number of trajectories,
            # so that groups of any size decay alike.
            self._rate += (survivors / finished - self._rate) * -math.expm1(
                -finished / self._memory
            )

    def state(self) -> float:
        """Returns a plain value for the checkpoint."""
        return self._rate

    def restore(self, state: float) -> None:
        """Continue from ``state``."""
        self._rate = state


class LengthRatio:
    """Mean length of trained trajectories over that of sampled ones: exponential averages over
    ``memory`` steps. 1 when neither staleness nor filters nor ranking prefer an episode by its
    length.
    """

    def __init__(self, memory: float = 16.0) -> None:
        self._keep = math.exp(-1 / memory)
        self._played, self._trained = (0.0, 0.0), (0.0, 0.0)

    def observe(self, played: Sequence[int], trained: Sequence[int]) -> None:
        """Count a step: the lengths of trajectories that ended since the last step, and of those
        that this step trains on.
        """
        self._played = self._average(self._played, played)
        self._trained = self._average(self._trained, trained)

    def state(self) -> list[list[float]]:
        """Returns plain values for the checkpoint."""
        return [list(self._played), list(self._trained)]

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        """Continue from ``state``."""
        (played, count), (trained, taken) = state
        self._played, self._trained = (played, count), (trained, taken)

    def _average(self, before: tuple[float, float], lengths: Sequence[int]) -> tuple[float, float]:
        """The decayed (sum, number)."""
        return before[0] * self._keep + sum(lengths), before[1] * self._keep + len(lengths)

    @property
    def value(self) -> float | None:
        """The ratio; None before the first trained trajectory."""
        (played, count), (trained, taken) = self._played, self._trained
        return (trained / taken) / (played / count) if played and taken else None
