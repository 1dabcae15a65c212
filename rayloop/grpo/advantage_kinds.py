"""Advantages other than GRPO's (docs/algorithm.md, section 3), a class for each.

Rewards of a group that are all equal give zeros, except to single turns, whose returns differ.
"""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Literal

from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import AdvantageBroken
from rayloop.core.groups import Credit, Member, Scored
from rayloop.core.types import Streams
from rayloop.grpo.advantage import advantages
from rayloop.grpo.settings import AdvantageSettings

STD_EPS = 1e-6
"""Added to standard deviations, as in GRPO."""
CENTRED = AdvantageSettings(normalize_std=False)


def rewards(members: Sequence[Member]) -> list[float]:
    """The rewards of scored members."""
    return [member.reward for member in members]


class Rloo:
    """RLOO (arXiv:2402.14740): the reward minus the mean of the other members' rewards."""

    def credits(self, members: Sequence[Member]) -> list[float]:
        """``n / (n - 1) * (r - mean)``."""
        n = len(members)
        return [n / (n - 1) * value for value in advantages(rewards(members), CENTRED).values]


class BatchScaled:
    """The reward minus its group's mean, divided by one deviation of the whole step.

    ``centred`` is REINFORCE++'s baseline form (arXiv:2501.03262); without it ScaleRL's
    (arXiv:2510.13786), and with ``of: rewards`` LitePPO's (arXiv:2508.08221; TRL's ``scale_rewards:
    batch``).
    """

    class Settings(SettingsModel):
        """Keys of ``with``."""

        of: Literal["advantages", "rewards"] = "advantages"
        """Values whose deviation it is, over the trajectories that the step trains."""
        centred: bool = False
        """Subtract the mean of the step's advantages first.

        The mean is not 0 where filters left groups partial.
        """

    def __init__(self, settings: Settings) -> None:
        self._of = settings.of
        self._centred = settings.centred

    def credits(self, members: Sequence[Member]) -> list[Credit]:
        """``r - mean``, before ``over_step``."""
        values = advantages(rewards(members), CENTRED).values
        bases = values if self._of == "advantages" else rewards(members)
        return [Credit(value, base=base) for value, base in zip(values, bases, strict=True)]

    def over_step(self, steps: Sequence[Sequence[Credit]]) -> list[list[Credit]]:
        """Divides by the unbiased deviation."""
        return _scaled(steps, centred=self._centred)


class Gdpo:
    """GDPO (arXiv:2601.05242, equations 4 to 6).

    Each component is normalised in its group, their weighted sum over the step.
    """

    class Settings(SettingsModel):
        """Keys of ``with``."""

        weights: dict[str, float] = Field(min_length=1)
        """Component of the reward -> its weight, for example ``{iou: 1.0, format: 0.5}``."""

    def __init__(self, settings: Settings) -> None:
        self._weights = settings.weights

    def credits(self, members: Sequence[Member]) -> list[Credit]:
        """The weighted sum, before ``over_step``.

        Raises AdvantageBroken for a component that a member lacks.
        """
        totals = [0.0] * len(members)
        for name, weight in self._weights.items():
            components = [_component(member, name) for member in members]
            parts = advantages(components, AdvantageSettings()).values
            totals = [total + weight * part for total, part in zip(totals, parts, strict=True)]
        return [Credit(total, base=total) for total in totals]

    def over_step(self, steps: Sequence[Sequence[Credit]]) -> list[list[Credit]]:
        """Subtracts the step's mean and divides by its unbiased deviation."""
        return _scaled(steps, centred=True)


class MaxRl:
    """MaxRL (arXiv:2602.02710): ``(r - mean) / mean``.

    A rare success weighs as much as the likelihood of any success asks for. For rewards of 0 and
    more; a group of zeros has zeros.
    """

    def credits(self, members: Sequence[Member]) -> list[float]:
        """Raises AdvantageBroken for a reward below 0."""
        values = rewards(members)
        if min(values) < 0:
            raise AdvantageBroken(
                "maxrl divides by the mean reward, which needs rewards of 0 and more; got"
                f" {min(values):g}"
            )

        mean = statistics.mean(values)
        return [0.0 if mean == 0 else value / mean for value in advantages(values, CENTRED).values]


class TurnReturns:
    """Each turn's discounted return, normalised over all turns of the group.

    The return ``sum of gamma^(k - t) * r_k over k >= t``, minus the mean and over the deviation.
    ``r_k`` is the environment's reward of turn k; the last turn also has the rest of the
    trajectory's reward.
    """

    class Settings(SettingsModel):
        """Keys of ``with``."""

        gamma: float = Field(0.95, ge=0, le=1)
        """Discount of a turn.

        0: a turn gets its own reward alone, as where several players take turns in one episode.
        """

    def __init__(self, settings: Settings) -> None:
        self._gamma = settings.gamma

    def credits(self, members: Sequence[Member]) -> list[Credit]:
        """One advantage for each turn."""
        returns = [turn_returns(member, self._gamma) for member in members]
        normalised = iter(_normalised(list(chain(*returns))))
        return [Credit.of_turns(list(islice(normalised, len(turns)))) for turns in returns]


class Gigpo:
    """GiGPO (arXiv:2505.10978, equations 3 to 8).

    The trajectory's advantage in its group, plus ``omega`` times the turn's advantage among the
    turns of the group that began at the same state: a screen and text that are equal byte for byte
    (``Summary.states``).
    """

    class Settings(SettingsModel):
        """Keys of ``with``."""

        gamma: float = Field(0.95, gt=0, le=1)
        """Discount of a turn in its return."""
        omega: float = Field(1.0, ge=0)
        """Weight of the turn's part."""
        normalize_std: bool = True
        """Divide both parts by their deviation."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def credits(self, members: Sequence[Member]) -> list[Credit]:
        """One advantage for each turn. Raises AdvantageBroken for a trajectory without states."""
        normalize_std = self._settings.normalize_std
        episode_settings = AdvantageSettings(normalize_std=normalize_std)
        episode = advantages(rewards(members), episode_settings).values
        states = _turns_by_state(members, self._settings.gamma)
        turns = [
            [value] * member.summary.turns for value, member in zip(episode, members, strict=True)
        ]
        for places in states.values():
            normalised = _normalised([value for _, _, value in places], normalize_std)
            for (i, t, _), value in zip(places, normalised, strict=True):
                turns[i][t] += self._settings.omega * value
        return [Credit.of_turns(values) for values in turns]


def _turns_by_state(
    members: Sequence[Member], gamma: float
) -> Mapping[str, list[tuple[int, int, float]]]:
    """By state, the turns that began at it, as (member, turn, discounted return).

    Turns are compared at equal states wherever they are in their episodes, also twice in one.
    """
    places = defaultdict[str, list[tuple[int, int, float]]](list)
    for i, member in enumerate(members):
        states = member.summary.states
        if len(states) != member.summary.turns:
            raise AdvantageBroken(
                f"gigpo compares turns by their states, which trajectory {member.summary.id}"
                " has not"
            )
        returns = turn_returns(member, gamma)
        for t, (state, value) in enumerate(zip(states, returns, strict=True)):
            places[state].append((i, t, value))
    return places


class Distill:
    """On-policy distillation (MiniLLM, arXiv:2306.08543).

    See also thinkingmachines.ai/blog/on-policy-distillation, 2025. The reward has no policy
    gradient; the KL term against the reference (``reference.path``) is the loss. No group is
    needed.
    """

    min_group = 1

    def credits(self, members: Sequence[Member]) -> list[Credit]:
        """No advantage, and no weight in the policy gradient."""
        return [Credit(0.0, streams=Streams(rl=0.0)) for _ in members]


def turn_returns(member: Member, gamma: float) -> list[float]:
    """The discounted return of each sampled turn over the turns that followed it in time.

    The undiscounted return of the first turn is the trajectory's reward. Raises AdvantageBroken for
    another number of rewards than of turns.
    """
    turns = member.summary.turns
    steps = list(member.summary.turn_rewards) or [0.0] * turns
    if len(steps) != turns:
        raise AdvantageBroken(
            f"trajectory {member.summary.id} has {len(steps)} turn_rewards for {turns} sampled"
            " turns"
        )

    # Turns are in the order of training; an agent's branches may have been sampled in another.
    order = member.summary.order or tuple(range(turns))
    if order:
        # The part of the reward that a grader gave at the end,
        # beyond the rewards of turns, belongs to the last turn in time.
        steps[order[-1]] += member.reward - sum(steps)
    total = 0.0
    returns = [0.0] * turns
    # Backwards, so that each return builds on the one that follows it.
    for turn in reversed(order):
        total = steps[turn] + gamma * total
        returns[turn] = total
    return returns


def _component(member: Member, name: str) -> float:
    components = member.outcome.components if isinstance(member.outcome, Scored) else {}
    if name not in components:
        names = ", ".join(components) or "none"
        raise AdvantageBroken(
            f"gdpo: with.weights names {name!r}; the components of trajectory {member.summary.id}"
            f" are: {names}"
        )
    return components[name]


def _normalised(values: Sequence[float], by_deviation: bool = True) -> Sequence[float]:
    """GRPO's formula; a lone value has 0."""
    if len(values) <= 1:
        return [0.0] * len(values)
    return advantages(values, AdvantageSettings(normalize_std=by_deviation)).values


def _scaled(steps: Sequence[Sequence[Credit]], *, centred: bool) -> list[list[Credit]]:
    """The advantages over the deviation of the credits' ``base``; first centred if ``centred``."""
    credits = list(chain(*steps))

    # The deviation may be that of the rewards, so it is computed from the bases.
    deviation = 1.0
    if len(credits) > 1:
        deviation = statistics.stdev([credit.base for credit in credits]) + STD_EPS
    mean = 0.0
    if centred and credits:
        mean = statistics.mean([credit.advantage for credit in credits])

    def scaled(credit: Credit) -> Credit:
        return dataclasses.replace(credit, advantage=(credit.advantage - mean) / deviation)

    return [list(map(scaled, group)) for group in steps]
