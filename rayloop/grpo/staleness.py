"""Staleness (docs/algorithm.md, section 7): how far generation may run ahead of training, bounded at admission."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from rayloop.core.types import Version

NO_LINEAGES: Mapping[int, int] = MappingProxyType({})


def lag(version: Version, training: Version) -> int:
    """Optimizer steps between the weights that sampled a trajectory and those that will train on it.

    Raises ValueError for a version from the future. Lineages are not compared; ``is_stale`` does.
    """
    if version.step > training.step:
        raise ValueError(f"version {version} is ahead of the trainer's {training}")
    return training.step - version.step


def is_stale(first: Version, training: Version, max_staleness: int, inherited: Mapping[int, int] = NO_LINEAGES) -> bool:
    """Whether a trajectory whose first token was sampled by ``first`` must not be trained by ``training``.

    A version of another lineage is dead, unless ``inherited`` gives the last step of that lineage which the present one
    descends from (the step of the checkpoint it was restored from): ready groups in a checkpoint are of that kind.
    """
    if first.lineage != training.lineage and first.step > inherited.get(first.lineage, -1):
        return True
    return lag(first, training) > max_staleness


def open_slots(max_staleness: int, target: int, ready: int, in_flight: int, acceptance: float) -> int:
    """How many more trajectories may start: ``(max_staleness + 1) * target - (ready + acceptance * in_flight)``.

    All in trajectories: ``target`` per step, ``ready`` survivors that wait, ``in_flight`` not yet filtered. Never
    negative. Raises ValueError unless 0 < acceptance <= 1 (at 0 the bound would be none).
    """
    if not 0 < acceptance <= 1:
        raise ValueError(f"an acceptance rate of {acceptance} does not bound what is in flight: it must be in (0, 1]")
    return max(0, (max_staleness + 1) * target - ready - math.ceil(in_flight * acceptance))


class AcceptanceRate:
    """The share of finished trajectories that survive the filters: an exponential average that starts at 1.

    ``memory`` is its time constant in trajectories. ``floor`` keeps it above 0, so that what is in flight stays bounded
    when nothing survives; 1 / max_generation_batches is the natural choice.
    """

    def __init__(self, memory: float, floor: float) -> None:
        if not (memory > 0 and 0 < floor <= 1):
            raise ValueError(f"memory must be positive and floor in (0, 1], not {memory} and {floor}")
        self._memory, self._floor, self._rate = memory, floor, 1.0

    @property
    def value(self) -> float:
        return max(self._floor, self._rate)

    def observe(self, survivors: int, finished: int) -> None:
        """Count ``finished`` trajectories (any number of groups), ``survivors`` of which were kept."""
        if not 0 <= survivors <= finished:
            raise ValueError(f"{survivors} survivors of {finished} finished trajectories")
        if finished:
            self._rate += (survivors / finished - self._rate) * -math.expm1(-finished / self._memory)

    def state(self) -> float:
        return self._rate

    def restore(self, state: float) -> None:
        self._rate = state
