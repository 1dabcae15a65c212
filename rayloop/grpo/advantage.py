"""The group-relative advantage of GRPO (arXiv:2402.03300), over the scored members of a group (docs/algorithm.md, section 3)."""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rayloop.core.failures import ConfigError
from rayloop.core.groups import Group, Scored, Status, TrajectoryState, Unscored
from rayloop.core.types import derive
from rayloop.grpo.settings import AdvantageSettings


@dataclass(frozen=True, slots=True)
class Advantages:
    """``values`` in the order of the rewards. ``mean`` and ``std`` (unbiased, whatever the divisor was) are those of the
    rewards, or of ``score != 0`` with the binarised baseline; groups are ranked by this std. A lone sample under
    ``singleton: raw`` has mean 0 and std 1, as in verl."""

    values: tuple[float, ...]
    mean: float
    std: float


def advantages(rewards: Sequence[float], settings: AdvantageSettings) -> Advantages:
    """``(r - mean) / (max(std_floor, std) + eps)`` (GRPO, arXiv:2402.03300), or ``r - mean`` (Dr. GRPO, arXiv:2503.20783).

    ``r - mean`` over n members is (n - 1) / n times the leave-one-out advantage of RLOO (arXiv:2402.14740). Sums are exact, so
    neither the order of the rewards nor their magnitude matters. Equal rewards (max - min <= tolerance) give exact zeros; not with
    the binarised baseline, which rewards equal successes on purpose, and does not divide by a spread of 0.
    Raises ValueError for no rewards, for a reward that is not finite and for an advantage too large for a float;
    ConfigError for a lone sample under ``singleton: error``.
    """
    scores = [float(reward) for reward in rewards]
    if not scores:
        raise ValueError("no rewards: a group without scored members has no advantages")
    if not all(map(math.isfinite, scores)):
        raise ValueError(f"rewards {scores} are not all finite: such a trajectory is Unscored(invalid_reward)")
    if len(scores) == 1:
        if settings.singleton == "error":
            raise ConfigError(
                "a group has one scored member, which has no baseline. Set algorithm.advantage.kind: raw to take the reward itself"
            )
        return Advantages((scores[0],), 0.0, 1.0)
    base = [float(score != 0) for score in scores] if settings.baseline == "binarised" else scores
    values = _values(scores, base, settings)
    if not all(map(math.isfinite, values)):
        raise ValueError(f"rewards {scores} are too far apart: an advantage is not finite")
    return Advantages(values, statistics.mean(base), statistics.stdev(base))


def _values(scores: Sequence[float], base: Sequence[float], settings: AdvantageSettings) -> tuple[float, ...]:
    if settings.baseline == "mean" and max(scores) - min(scores) <= settings.tolerance:
        return (0.0,) * len(scores)
    mean = statistics.mean(base)
    if not settings.normalize_std or max(base) == min(base):
        return tuple(score - mean for score in scores)
    std = statistics.stdev(base) if settings.std == "unbiased" else statistics.pstdev(base)
    divisor = max(settings.std_floor, std) + settings.eps
    return tuple((score - mean) / divisor for score in scores)


def with_advantages(group: Group, settings: AdvantageSettings) -> Group:
    """Returns the group with advantage, mean and std over its scored members, before any filter. Unscored members become
    ``excluded[kind]``; fewer than ``min_group`` scored ones become ``excluded[min_group]``, without mean and std. Members that
    already have a status are left alone."""
    members = tuple(
        replace(m, status=Status(TrajectoryState.EXCLUDED, str(m.outcome.kind)))
        if m.kept and isinstance(m.outcome, Unscored)
        else m
        for m in group.members
    )
    group = replace(group, members=members, mean=None, std=None)
    positions = [i for i, m in enumerate(members) if m.kept and isinstance(m.outcome, Scored)]
    if len(positions) < settings.min_group:
        lonely = Status(TrajectoryState.EXCLUDED, "min_group")
        return group.map({i: replace(members[i], status=lonely) for i in positions})
    rewards = [members[i].reward for i in positions]
    if settings.permuted:
        random.Random(derive(0, "permuted rewards", group.number)).shuffle(rewards)
    result = advantages(rewards, settings)
    scored = {i: replace(members[i], advantage=value) for i, value in zip(positions, result.values, strict=True)}
    return replace(group.map(scored), mean=result.mean, std=result.std)
