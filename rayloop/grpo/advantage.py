"""The advantage of each scored member of a group (docs/algorithm.md, section 3): the seam, and
GRPO's (arXiv:2402.03300).
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
    """Turns the rewards of a group into what its members are trained with.

    A class may have ``min_group`` (2 without it): a group with fewer scored members is excluded;
    and ``over_step``, which receives the credits of all groups of a step before they are trained,
    and returns as many: for a scale over the batch.
    """

    def credits(self, members: Sequence[Member]) -> Sequence[float | Credit]:
        """One advantage for each of ``members``, the scored ones of a group, in their order: a
        number for all sampled tokens, or a ``Credit``. A member has ``reward``,
        ``outcome.components`` and ``summary`` (turns, turn_rewards, states, lengths).
        """


@dataclass(frozen=True, slots=True)
class Advantages:
    """``values`` in the order of the rewards.

    ``mean`` and unbiased ``std``, by which groups are ranked, are those of the rewards, or of
    ``score != 0`` with the binarised baseline. A lone sample has mean 0 and std 1, as in verl.
    """

    values: tuple[float, ...]
    mean: float
    std: float


def advantages(rewards: Sequence[float], settings: AdvantageSettings) -> Advantages:
    """``(r - mean) / (max(std_floor, std) + eps)`` (GRPO, arXiv:2402.03300), or ``r - mean`` (Dr.

    GRPO, arXiv:2503.20783).

    ``r - mean`` over n members is (n - 1) / n times the leave-one-out advantage of RLOO
    (arXiv:2402.14740). Sums are exact, so neither the order of the rewards nor their magnitude
    matters. Equal rewards (max - min <= tolerance) give exact zeros; not with the binarised
    baseline, which rewards equal successes and does not divide by 0. Raises ValueError for no
    rewards, for a reward that is not finite and for an advantage too large for a float; ConfigError
    for a lone sample under ``singleton: error``.
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
    base = [float(score != 0) for score in scores] if settings.baseline == "binarised" else scores
    values = _values(scores, base, settings)

    # Rewards of 1e308 are finite, their differences need not be.
    if not all(map(math.isfinite, values)):
        raise ValueError(f"rewards {scores} are too far apart: an advantage is not finite")
    return Advantages(values, statistics.mean(base), statistics.stdev(base))


def _values(
    scores: Sequence[float], base: Sequence[float], settings: AdvantageSettings
) -> tuple[float, ...]:
    # Rewards that differ by rounding alone would be blown up to a deviation of 1.
    if settings.baseline == "mean" and max(scores) - min(scores) <= settings.tolerance:
        return (0.0,) * len(scores)
    mean = statistics.mean(base)
    if not settings.normalize_std or max(base) == min(base):
        return tuple(score - mean for score in scores)
    std = statistics.stdev(base) if settings.std == "unbiased" else statistics.pstdev(base)
    divisor = max(settings.std_floor, std) + settings.eps
    return tuple((score - mean) / divisor for score in scores)


class Grpo:
    """GRPO (arXiv:2402.03300) and the formulas that differ from it by a setting (docs/algorithm.md,
    section 3).
    """

    Settings = AdvantageSettings

    def __init__(self, settings: AdvantageSettings) -> None:
        self.settings, self.min_group = settings, settings.min_group

    def credits(self, members: Sequence[Member]) -> Sequence[float]:
        """``advantages`` of the rewards."""
        rewards = [member.reward for member in members]
        # The draw depends on the group alone, so that a resumed run shuffles alike.
        if self.settings.permuted:
            random.Random(derive(0, "permuted rewards", members[-1].summary.id.group)).shuffle(
                rewards
            )
        return advantages(rewards, self.settings).values

    def baseline(self, rewards: Sequence[float]) -> tuple[float, float]:
        """Mean and deviation by which groups are ranked: with the binarised baseline, of ``reward
        != 0``.
        """
        return _spread(
            [float(r != 0) for r in rewards] if self.settings.baseline == "binarised" else rewards
        )


class CheckedAdvantage:
    """An advantage whose results are checked; ``use`` names it in errors."""

    def __init__(self, made: Any, use: str) -> None:
        self._made, self._use = made, use
        self.min_group: int = getattr(made, "min_group", 2)
        self._credits = made.credits if hasattr(made, "credits") else made

    def credits(self, members: Sequence[Member]) -> list[Credit]:
        """The credits.

        Raises AdvantageBroken when there is not one finite number (or one for each turn) for each
        member.
        """
        try:
            found = [
                value if isinstance(value, Credit) else Credit(float(value))
                for value in self._credits(members)
            ]
        except AdvantageBroken:
            # A shipped kind raises it with its own reason, which must not be wrapped.
            raise
        except Exception as error:
            raise AdvantageBroken(
                f"{self._use} raised on {_which(members)}: {type(error).__name__}: {error}"
            ) from error
        if len(found) != len(members):
            raise AdvantageBroken(
                f"{self._use} returned {len(found)} advantages for {len(members)} members of"
                f" {_which(members)}"
            )
        for credit, member in zip(found, members, strict=True):
            if not all(map(math.isfinite, (credit.advantage, *credit.turns))):
                raise AdvantageBroken(
                    f"{self._use} returned {credit} for trajectory {member.summary.id}, which is"
                    " not finite"
                )
            if credit.turns and len(credit.turns) != member.summary.turns:
                what = f"{len(credit.turns)} advantages for the {member.summary.turns} turns"
                raise AdvantageBroken(
                    f"{self._use} returned {what} of trajectory {member.summary.id}"
                )
        return found

    def over_step(self, steps: Sequence[Sequence[Credit]]) -> Sequence[Sequence[Credit]]:
        """The credits of all groups of a step, rescaled together where the advantage does that.

        Raises AdvantageBroken when it raises, or when there are not as many finite credits.
        """
        if not hasattr(self._made, "over_step"):
            return steps
        try:
            found = [list(group) for group in self._made.over_step(steps)]
        except Exception as error:
            raise AdvantageBroken(
                f"{self._use}: over_step raised {type(error).__name__}: {error}"
            ) from error
        got, given = ([len(group) for group in groups] for groups in (found, steps))
        if got != given:
            raise AdvantageBroken(
                f"{self._use}: over_step returned {got} credits for groups of {given}"
            )
        for credit in itertools.chain.from_iterable(found):
            if not isinstance(credit, Credit) or not all(
                map(math.isfinite, (credit.advantage, *credit.turns))
            ):
                raise AdvantageBroken(
                    f"{self._use}: over_step returned {credit!r}; expected a Credit of finite"
                    " numbers"
                )
        return found

    def baseline(self, members: Sequence[Member], credits: Sequence[Credit]) -> tuple[float, float]:
        """The mean of the rewards, and the deviation by which groups are ranked.

        Beside GRPO's formulas it is that of the advantages, of each turn where turns have one: some
        kinds learn from a group whose rewards are all equal.
        """
        rewards = [member.reward for member in members]
        if hasattr(self._made, "baseline"):
            mean, std = self._made.baseline(rewards)
            return mean, std
        advantages = [value for credit in credits for value in credit.turns or (credit.advantage,)]
        return _spread(rewards)[0], _spread(advantages)[1]


def build_advantage(choice: AdvantageChoice) -> CheckedAdvantage:
    """What ``with_advantages`` takes. Raises ConfigError, pydantic.ValidationError."""
    return CheckedAdvantage(choice.build(), f"algorithm.advantage: {choice.kind or choice.use}")


def with_advantages(group: Group, how: CheckedAdvantage | AdvantageSettings) -> Group:
    """Returns the group with credits, mean and std over its scored members, before any filter.

    Unscored members become ``excluded[kind]``; fewer than ``min_group`` scored ones become
    ``excluded[min_group]``, without mean and std. Members that already have a status are left
    alone. Raises AdvantageBroken.
    """
    if isinstance(how, AdvantageSettings):
        how = CheckedAdvantage(Grpo(how), "GRPO")
    members = tuple(
        (
            replace(m, status=Status(TrajectoryState.EXCLUDED, str(m.outcome.kind)))
            if m.kept and isinstance(m.outcome, Unscored)
            else m
        )
        for m in group.members
    )
    group = replace(group, members=members, mean=None, std=None)

    # Statistics are of scored members alone: a guessed reward would shift all others.
    positions = [i for i, m in enumerate(members) if m.kept and isinstance(m.outcome, Scored)]
    if len(positions) < how.min_group or not positions:
        lonely = Status(TrajectoryState.EXCLUDED, "min_group")
        return group.map({i: replace(members[i], status=lonely) for i in positions})
    scored = [members[i] for i in positions]
    credits = how.credits(scored)
    mean, std = how.baseline(scored, credits)
    changed = {
        i: replace(members[i], credit=credit) for i, credit in zip(positions, credits, strict=True)
    }
    return replace(group.map(changed), mean=mean, std=std)


def over_step(groups: Sequence[Group], how: CheckedAdvantage) -> tuple[Group, ...]:
    """Returns the groups of a step with the credits of their kept members rescaled over all of
    them, where ``how`` does that.
    """
    kept = [[(i, m) for i, m in enumerate(group.members) if m.kept] for group in groups]
    before = [[m.credit or Credit(0.0) for _, m in members] for members in kept]

    # Members that filters took out do not train, so
    # they do not count in the step's deviation either.
    after = how.over_step(before)
    # Most kinds have no scale over the step; then no group is copied.
    if after is before:
        return tuple(groups)
    return tuple(
        group.map(
            {i: replace(m, credit=credit) for (i, m), credit in zip(members, credits, strict=True)}
        )
        for group, members, credits in zip(groups, kept, after, strict=True)
    )


def _spread(values: Sequence[float]) -> tuple[float, float]:
    return (statistics.mean(values), statistics.stdev(values)) if len(values) > 1 else (0.0, 1.0)


def _which(members: Sequence[Member]) -> str:
    return f"group {members[-1].summary.id.group} (task {members[-1].summary.task_id})"
