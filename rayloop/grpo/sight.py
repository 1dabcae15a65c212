"""Whether the policy looks, turn by turn (docs/algorithm.md, section 11).

The trainer scores a share of the turns once more with pictures of another task
(``rayloop/engines/training/sight.py``). Where a policy looks, its action becomes less likely.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import fmean

from rayloop.core.types import TrajectoryId
from rayloop.grpo.collapse import Alarm, Floor

TurnChanges = tuple[float | None, ...]
"""Per sampled turn, how much likelier its action was with its own pictures, in nats a token.

None where the turn was not scored again.
"""

KEPT_TURNS = 128
"""Number of scored turns that are compared; members of a group at the same turn count as one."""
LEAST_NEWEST_TURNS = 3
"""Fewest turns that are called blind."""
NEAR_ZERO_SHARE = 0.1
"""Share of the earlier mean below which a change counts as none."""
BLIND = Floor(warn=2e-5)
"""Probability that turns of an unchanged policy look blind by chance, below which it warns."""
LAST_NAMED_TURN = 9
"""The turn whose metric includes all later ones."""


def sight_metrics(changes: Mapping[TrajectoryId, TurnChanges]) -> dict[str, float]:
    """The metrics of a step: the mean change of all its scored turns, and by turn from 1."""
    by_turn = defaultdict[int, list[float]](list)
    for turns in changes.values():
        for number, change in enumerate(turns, 1):
            if change is not None:
                by_turn[min(number, LAST_NAMED_TURN)].append(change)
    if not by_turn:
        return {}
    metrics = {"actor/sight": fmean(chain(*by_turn.values()))}
    for number, values in sorted(by_turn.items()):
        metrics[f"actor/sight/turn_{number}"] = fmean(values)
    return metrics


def of_screens(changes: Mapping[TrajectoryId, TurnChanges]) -> list[float]:
    """The mean change of each group and turn: members of a group may see the same."""
    of_members = defaultdict[tuple[int, int], list[float]](list)
    for trajectory_id, turns in changes.items():
        for number, change in enumerate(turns):
            if change is not None:
                of_members[trajectory_id.group, number].append(change)
    return list(map(fmean, of_members.values()))


def blindness(sizes: Sequence[float]) -> tuple[float, int]:
    """Returns how probable it is that the newest of ``sizes`` (>= 0) are near 0 by chance.

    Beside the probability there is the number of those newest sizes, 0 where they are not near 0.
    If nothing has changed, every order of the sizes is as probable as any other: of m earlier and n
    newest ones, the n newest are among the k + n smallest with C(k + n, n) / C(m + n, n).
    """
    least = (1.0, 0)
    for count in range(LEAST_NEWEST_TURNS, len(sizes)):
        earlier = sizes[:-count]
        largest = max(sizes[-count:])
        if largest > NEAR_ZERO_SHARE * fmean(earlier):
            continue
        as_small = sum(size <= largest for size in earlier)
        chance = math.comb(as_small + count, count) / math.comb(len(sizes), count)
        least = min(least, (chance, count))
    return least


class Sight:
    """Watches the changes of scored turns for a policy that has become blind."""

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=KEPT_TURNS)
        """The newest values of ``of_screens``; a checkpoint keeps them."""

    def step(self, changes: Iterable[float]) -> dict[str, Alarm]:
        """Add the changes of a step; returns the alarm by its name."""
        self.values.extend(changes)
        sizes = [abs(value) for value in self.values]
        chance, count = blindness(sizes)
        if not count:
            return {}
        text = (
            f"another task's picture changes the actions on the last {count} screens by"
            f" {max(sizes[-count:]):.1e} nats a token at most, and changed those before by"
            f" {fmean(sizes[:-count]):.2g} in the mean: the policy does not look any more. Look at"
            " what it is shown (rollouts), and whether one action earns the reward on every screen"
        )
        return {"sight": (chance, BLIND, text)}
