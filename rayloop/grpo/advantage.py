"""The advantage of each scored member of a group (docs/algorithm.md, section 3).

The interface of an advantage, and GRPO's (arXiv:2402.03300).
"""

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rayloop.core.failures import AdvantageBroken, ConfigError
from rayloop.core.groups import Credit, Group, Member, Scored, Status, TrajectoryState, Unscored
from rayloop.core.types import derive
from rayloop.grpo.settings import AdvantageChoice, AdvantageSettings


class Advantage(Protocol):
    """Turns the rewards of a group into the advantages of its members.

    A class may have ``min_group`` (2 without it): a group with fewer scored members is excluded;
    and ``over_step``, which receives the credits of all groups of a step before they are trained,
    and returns as many: for a scale over the batch.
    """

    def credits(self, members: Sequence[Member]) -> Sequence[float | Credit]:
        """One advantage for each of ``members``, the scored ones of a group, in their order.

        An advantage is a number for all sampled tokens, or a ``Credit``. A member has ``reward``,
        ``outcome.components`` and ``summary`` (turns, turn_rewards, states, lengths).
        """


@dataclass(frozen=True)
class Advantages:
    """The advantages of a group: ``values`` in the order of the rewards.

    Groups are ranked by ``mean`` and unbiased ``std``. They are computed from the rewards, or from
    ``score != 0`` with the binarised baseline. A lone sample has mean 0 and std 1, as in verl.
    """

    values: tuple[float, ...]
    mean: float
    std: float


def advantages(rewards: Sequence[float], settings: AdvantageSettings) -> Advantages:
    """Returns the advantages of a group's rewards, by GRPO's formula or Dr. GRPO's.

    GRPO (arXiv:2402.03300): ``(r - mean) / (max(std_floor, std) + eps)``; Dr. GRPO
    (arXiv:2503.20783): ``r - mean``, which over n members is (n - 1) / n times the leave-one-out
    advantage of RLOO (arXiv:2402.14740). Sums are exact, so neither the order of the rewards nor
    their magnitude matters. Equal rewards (max - min <= tolerance) give exact zeros; not with the
    binarised baseline, which rewards equal successes and does not divide by 0. Raises ValueError
    for no rewards, for a reward that is not finite and for an advantage too large for a float;
    ConfigError for a lone sample under ``singleton: error``.
    """
    scores = [float(reward) for reward in rewards]
    if not scores:
        raise ValueError("no rewards: a group without scored members has no advantages")
    if not all(map(math.isfinite, scores)):
        raise ValueError(
            f"rewards {scores} are not all finite: such a trajectory is Unscored(invalid_reward)"
        )
    # A lone sample has no deviation: statistics.stdev would raise.
    if len(scores) == 1:
        if settings.singleton == "error":
            raise ConfigError(
                "a group has one scored member, which has no baseline. Set"
                " algorithm.advantage.kind: raw to take the reward itself"
            )
        return Advantages((scores[0],), 0.0, 1.0)
    base = _base(scores, settings)
    values = _values(scores, base, settings)

    # Rewards of 1e308 are finite, their differences need not be.
    if not all(map(math.isfinite, values)):
        raise ValueError(f"rewards {scores} are too far apart: an advantage is not finite")
    return Advantages(values, statistics.mean(base), statistics.stdev(base))


def _base(rewards: Sequence[float], settings: AdvantageSettings) -> Sequence[float]:
    """The numbers whose mean and deviation normalise the rewards."""
    if settings.baseline == "binarised":
        return [float(reward != 0) for reward in rewards]
    return rewards


def _values(
    scores: Sequence[float], base: Sequence[float], settings: AdvantageSettings
) -> tuple[float, ...]:
    # Rewards that differ by rounding alone would be scaled to a deviation of 1.
    if settings.baseline == "mean" and max(scores) - min(scores) <= settings.tolerance:
        return (0.0,) * len(scores)
    mean = statistics.mean(base)
    if not settings.normalize_std or max(base) == min(base):
        return tuple(score - mean for score in scores)
    deviation = statistics.stdev if settings.std == "unbiased" else statistics.pstdev
    divisor = max(settings.std_floor, deviation(base)) + settings.eps
    return tuple((score - mean) / divisor for score in scores)


class Grpo:
    """GRPO (arXiv:2402.03300) and the formulas that differ from it by a setting.

    docs/algorithm.md, section 3.
    """

    Settings = AdvantageSettings

    def __init__(self, settings: AdvantageSettings) -> None:
        self.settings = settings
        self.min_group = settings.min_group

    def credits(self, members: Sequence[Member]) -> Sequence[float]:
        """``advantages`` of the rewards."""
        rewards = [member.reward for member in members]
        if self.settings.permuted:
            # The draw depends on the group alone, so that a resumed run shuffles in the same order.
            seed = derive(0, "permuted rewards", members[-1].summary.id.group)
            random.Random(seed).shuffle(rewards)
        return advantages(rewards, self.settings).values

    def baseline(self, rewards: Sequence[float]) -> tuple[float, float]:
        """Mean and deviation by which groups are ranked.

        With the binarised baseline they are computed from ``reward != 0``.
        """
        return _mean_and_std(_base(rewards, self.settings))


class CheckedAdvantage:
    """An advantage whose results are checked; ``use`` names it in errors."""

    def __init__(self, made: Any, use: str) -> None:
        self._advantage = made
        self._use = use
        self.min_group: int = getattr(made, "min_group", 2)
        self._credits = getattr(made, "credits", made)

    def credits(self, members: Sequence[Member]) -> list[Credit]:
        """The credits.

        Raises AdvantageBroken when there is not one finite number (or one for each turn) for each
        member.
        """
        try:
            credits = [
                value if isinstance(value, Credit) else Credit(float(value))
                for value in self._credits(members)
            ]
        except AdvantageBroken:
            # A shipped kind raises it with its own reason, which must not be wrapped.
            raise
        except Exception as error:
            raise AdvantageBroken(
                f"{self._use} raised on {_group_name(members)}: {type(error).__name__}: {error}"
            ) from error
        if len(credits) != len(members):
            raise AdvantageBroken(
                f"{self._use} returned {len(credits)} advantages for {len(members)} members of"
                f" {_group_name(members)}"
            )
        for credit, member in zip(credits, members, strict=True):
            self._check(credit, member)
        return credits

    def _check(self, credit: Credit, member: Member) -> None:
        if not _is_finite(credit):
            raise AdvantageBroken(
                f"{self._use} returned {credit} for trajectory {member.summary.id}, which is not"
                " finite"
            )
        if credit.turns and len(credit.turns) != member.summary.turns:
            raise AdvantageBroken(
                f"{self._use} returned {len(credit.turns)} advantages for the"
                f" {member.summary.turns} turns of trajectory {member.summary.id}"
            )

    def over_step(self, steps: Sequence[Sequence[Credit]]) -> Sequence[Sequence[Credit]]:
        """The credits of all groups of a step, rescaled together where the advantage does that.

        Raises AdvantageBroken when it raises, or when there are not as many finite credits.
        """
        if not hasattr(self._advantage, "over_step"):
            return steps
        try:
            scaled = [list(group) for group in self._advantage.over_step(steps)]
        except Exception as error:
            raise AdvantageBroken(
                f"{self._use}: over_step raised {type(error).__name__}: {error}"
            ) from error
        sizes = [len(group) for group in scaled]
        expected_sizes = [len(group) for group in steps]
        if sizes != expected_sizes:
            raise AdvantageBroken(
                f"{self._use}: over_step returned {sizes} credits for groups of {expected_sizes}"
            )
        for credit in itertools.chain(*scaled):
            if not isinstance(credit, Credit) or not _is_finite(credit):
                raise AdvantageBroken(
                    f"{self._use}: over_step returned {credit!r}; expected a Credit of finite"
                    " numbers"
                )
        return scaled

    def baseline(self, members: Sequence[Member], credits: Sequence[Credit]) -> tuple[float, float]:
        """The mean of the rewards, and the deviation by which groups are ranked.

        With other formulas than GRPO's the deviation is that of the advantages, of each turn where
        turns have one: some kinds learn from a group whose rewards are all equal.
        """
        rewards = [member.reward for member in members]
        if hasattr(self._advantage, "baseline"):
            mean, std = self._advantage.baseline(rewards)
            return mean, std
        advantages: list[float] = []
        for credit in credits:
            advantages += credit.turns or (credit.advantage,)
        mean, _ = _mean_and_std(rewards)
        _, std = _mean_and_std(advantages)
        return mean, std


def build_advantage(choice: AdvantageChoice) -> CheckedAdvantage:
    """The advantage for ``with_advantages``. Raises ConfigError, pydantic.ValidationError."""
    return CheckedAdvantage(choice.build(), f"algorithm.advantage: {choice.kind or choice.use}")


def with_advantages(group: Group, how: CheckedAdvantage | AdvantageSettings) -> Group:
    """Returns the group with credits, mean and std over its scored members, before any filter.

    Unscored members become ``excluded[kind]``; fewer than ``min_group`` scored ones become
    ``excluded[min_group]``, without mean and std. Members that already have a status are left
    alone. Raises AdvantageBroken.
    """
    if isinstance(how, AdvantageSettings):
        how = CheckedAdvantage(Grpo(how), "GRPO")
    members = tuple(map(_without_unscored, group.members))
    group = replace(group, members=members, mean=None, std=None)

    # Statistics are of scored members alone: a guessed reward would shift all others.
    positions = [i for i, m in enumerate(members) if m.kept and isinstance(m.outcome, Scored)]
    if len(positions) < how.min_group or not positions:
        too_few = Status(TrajectoryState.EXCLUDED, "min_group")
        return group.map({i: replace(members[i], status=too_few) for i in positions})
    scored_members = [members[i] for i in positions]
    credits = how.credits(scored_members)
    mean, std = how.baseline(scored_members, credits)
    return replace(_with_credits(group, positions, credits), mean=mean, std=std)


def over_step(groups: Sequence[Group], how: CheckedAdvantage) -> tuple[Group, ...]:
    """Returns the groups of a step with credits that ``how`` rescales over all of them.

    Only kept members count.
    """
    # Members that filters took out do not train, so
    # they do not count in the step's deviation either.
    steps = [_credits_of_kept(group) for group in groups]
    scaled = how.over_step(steps)
    # Most kinds have no scale over the step; then no group is copied.
    if scaled is steps:
        return tuple(groups)
    rescaled: list[Group] = []
    for group, credits in zip(groups, scaled, strict=True):
        positions = [i for i, member in enumerate(group.members) if member.kept]
        rescaled.append(_with_credits(group, positions, credits))
    return tuple(rescaled)


def _credits_of_kept(group: Group) -> list[Credit]:
    return [member.credit or Credit(0.0) for member in group.kept]


def _without_unscored(member: Member) -> Member:
    """The member, excluded if it has no reward and no status yet."""
    if member.kept and isinstance(member.outcome, Unscored):
        return replace(member, status=Status(TrajectoryState.EXCLUDED, str(member.outcome.kind)))
    return member


def _with_credits(group: Group, positions: Sequence[int], credits: Sequence[Credit]) -> Group:
    """The group; the members at ``positions`` have these credits."""
    members = {
        i: replace(group.members[i], credit=credit)
        for i, credit in zip(positions, credits, strict=True)
    }
    return group.map(members)


def _is_finite(credit: Credit) -> bool:
    return all(map(math.isfinite, (credit.advantage, *credit.turns)))


def _mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    if len(values) <= 1:
        return 0.0, 1.0
    return statistics.mean(values), statistics.stdev(values)


def _group_name(members: Sequence[Member]) -> str:
    summary = members[-1].summary
    return f"group {summary.id.group} (task {summary.task_id})"
