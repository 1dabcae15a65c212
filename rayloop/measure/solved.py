"""pass@k: how likely one of k answers to a task is right, from n sampled ones. numpy only, through ``intervals``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import prod

from rayloop.measure.controls import SAMPLED, Item
from rayloop.measure.intervals import Interval, interval


def pass_at(answers: int, right: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k) for n ``answers``, c of them ``right``: the unbiased estimator of Chen et al. (2021), section 2.1.

    Raises ValueError unless 0 <= right <= answers and 1 <= k <= answers.
    """
    if not (0 <= right <= answers and 1 <= k <= answers):
        raise ValueError(f"pass@{k} of {answers} answers, {right} of them right")
    return 1.0 - prod(1.0 - k / number for number in range(answers - right + 1, answers + 1))


def pass_rates(items: Iterable[Item], score: str, least: float, arm: str = SAMPLED) -> dict[int, Interval]:
    """k -> pass@k over tasks with its 95 % interval, for k = 1, 2, 4, ... and the number of sampled answers.

    An answer is right when its ``score`` is at least ``least``. Every task counts alike, so all have as many answers as the task
    with fewest; what more a task has also counts, in n. Without sampled answers there is nothing.
    """
    found: dict[str, list[bool]] = defaultdict(list)
    for item in items:
        if item.arm == arm and score in item.scores:
            found[item.task].append(item.scores[score] >= least)
    if not found:
        return {}
    most = min(map(len, found.values()))
    counts = sorted({*(2**n for n in range(most.bit_length())), most})
    tasks = [found[name] for name in sorted(found)]
    return {k: interval([pass_at(len(task), sum(task), k) for task in tasks]) for k in counts}


def solved_tasks(items: Iterable[Item], score: str, least: float) -> set[str]:
    """The tasks with at least one right answer, of any arm that shows the right image."""
    return {item.task for item in items if score in item.scores and item.scores[score] >= least}
