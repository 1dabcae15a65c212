"""Staleness: how far generation may run ahead of training, bounded at admission.

docs/algorithm.md, section 7.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from rayloop.core.groups import Group, Member, Status, TrajectoryState
from rayloop.core.types import Version

NO_LINEAGES: Mapping[int, int] = MappingProxyType({})


def lag(version: Version, training: Version) -> int:
    """Optimizer steps between the weights that sampled a trajectory and the weights it trains.

    Raises ValueError for a version from the future. Only ``is_stale`` compares lineages.
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
    """Whether a trajectory that ``first``, its oldest version, began is too old for ``training``.

    A version of another lineage is stale, unless the present lineage continues from it:
    ``inherited`` has the last such step of each lineage.
    """
    # A restored run trains the steps after its checkpoint again, to other weights.
    if first.lineage != training.lineage and first.step > inherited.get(first.lineage, -1):
        return True
    return lag(first, training) > max_staleness


def is_due(
    first: Version,
    training: Version,
    max_staleness: int,
    inherited: Mapping[int, int] = NO_LINEAGES,
) -> bool:
    """Whether what ``first`` began may be trained by ``training``, and by no later version."""
    stale_for = partial(is_stale, first, max_staleness=max_staleness, inherited=inherited)
    following = Version(training.lineage, training.step + 1)
    return stale_for(following) and not stale_for(training)


def expired(
    group: Group, training: Version, max_staleness: int, inherited: Mapping[int, int] = NO_LINEAGES
) -> Group:
    """Returns the group, its members that are too old for ``training`` marked stale.

    Replayed ones have their own age limit.
    """
    stale: dict[int, Member] = {}
    for i, member in enumerate(group.members):
        if not member.kept or member.replayed:
            continue
        if is_stale(member.summary.first_version, training, max_staleness, inherited):
            stale[i] = replace(member, status=Status(TrajectoryState.STALE))
    return group.map(stale) if stale else group


def began(group: Group) -> float:
    """Returns the step of the oldest version that sampled a turn of a kept member.

    Infinite when all kept ones are replayed.
    """
    # Replayed members are old by design, and would make every such group the oldest.
    steps = (member.summary.first_version.step for member in group.kept if not member.replayed)
    return min(steps, default=math.inf)


def open_slots(
    max_staleness: int, target: int, ready: int, in_flight: int, acceptance: float
) -> int:
    """Returns how many more trajectories may start.

    ``(max_staleness + 1) * target - (ready + acceptance * in_flight)``, at least 0: ``target`` per
    step, ``ready`` survivors, ``in_flight`` unfiltered. Raises ValueError unless
    0 < acceptance <= 1.
    """
    if not 0 < acceptance <= 1:
        raise ValueError(
            f"an acceptance rate of {acceptance} does not bound what is in flight: it must be in"
            " (0, 1]"
        )
    # The share is rounded up, so that the survivors never exceed the bound by a fraction.
    survivors_in_flight = math.ceil(in_flight * acceptance)
    return max(0, (max_staleness + 1) * target - ready - survivors_in_flight)


class AcceptanceRate:
    """The share of finished trajectories that survive the filters.

    It is an exponential average that starts at 1. ``memory`` is its time constant in trajectories;
    ``floor`` (1 / max_generation_batches) bounds the trajectories in flight when none survives.
    """

    def __init__(self, memory: float, floor: float) -> None:
        if not (memory > 0 and 0 < floor <= 1):
            raise ValueError(
                f"memory must be positive and floor in (0, 1], not {memory} and {floor}"
            )
        self._memory = memory
        self._floor = floor
        self._rate = 1.0

    @property
    def value(self) -> float:
        """The share, at least ``floor``."""
        return max(self._floor, self._rate)

    def observe(self, survivors: int, finished: int) -> None:
        """Count ``finished`` trajectories of any number of groups; ``survivors`` were kept."""
        if not 0 <= survivors <= finished:
            raise ValueError(f"{survivors} survivors of {finished} finished trajectories")
        if finished:
            # The weight depends on the number of trajectories,
            # so that groups of any size decay at the same rate.
            weight = -math.expm1(-finished / self._memory)
            self._rate += (survivors / finished - self._rate) * weight

    def state(self) -> float:
        """Returns a plain value for the checkpoint."""
        return self._rate

    def restore(self, state: float) -> None:
        """Continue from ``state``."""
        self._rate = state


class LengthRatio:
    """Mean length of trained trajectories, divided by the mean length of sampled ones.

    The means are exponential averages over ``memory`` steps. 1 when neither staleness nor filters
    nor ranking prefer an episode by its length.
    """

    def __init__(self, memory: float = 16.0) -> None:
        self._decay = math.exp(-1 / memory)
        # Each is a decayed (sum of lengths, number).
        self._played = (0.0, 0.0)
        self._trained = (0.0, 0.0)

    def observe(self, played: Sequence[int], trained: Sequence[int]) -> None:
        """Count the lengths of a step's trajectories.

        ``played``: lengths that ended since the last step; ``trained``: lengths that this step
        trains on.
        """
        self._played = self._average(self._played, played)
        self._trained = self._average(self._trained, trained)

    def state(self) -> list[list[float]]:
        """Returns plain values for the checkpoint."""
        return [list(self._played), list(self._trained)]

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        """Continue from ``state``."""
        (played_sum, played), (trained_sum, trained) = state
        self._played = (played_sum, played)
        self._trained = (trained_sum, trained)

    def _average(
        self, previous: tuple[float, float], lengths: Sequence[int]
    ) -> tuple[float, float]:
        """The decayed (sum, number)."""
        total, number = previous
        return total * self._decay + sum(lengths), number * self._decay + len(lengths)

    @property
    def value(self) -> float | None:
        """The ratio; None before the first trained trajectory."""
        played_sum, played = self._played
        trained_sum, trained = self._trained
        if not played_sum or not trained:
            return None
        return (trained_sum / trained) / (played_sum / played)
