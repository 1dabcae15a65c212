"""Evaluation against controls, and pass@k of answers.

A policy looks only if the right image scores higher than another image of the same kind, than one
of another kind, and than the best answer without any (the blind prior), each beyond chance.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Protocol

from rayloop.core.groups import Scored
from rayloop.core.types import ImageSource, Task, derive
from rayloop.measure.intervals import Interval, interval, paired_interval, pass_at

RIGHT = "right"
"""The arm with the right image."""
SAME = "same source"
"""The arm with another image of the same source."""
OTHER = "other source"
"""The arm with an image of another source."""
BLIND = "blind"
"""The arm of the blind prior."""
SAMPLED = "sampled"
"""The arm with the right image and sampled answers."""
CONTROLS = (BLIND, SAME, OTHER)
WORDS = {
    BLIND: "the best answer without an image",
    SAME: "another image of the same source",
    OTHER: "an image of another source",
}
NOT_PLAYED = {
    BLIND: f"{WORDS[BLIND]} (evaluation.blind names none)",
    SAME: f"{WORDS[SAME]} (no two tasks of one source have different images)",
    OTHER: (
        f"{WORDS[OTHER]} (all tasks with images have one source; a column data_source names kinds)"
    ),
}
"""A control that was not played, and why."""


class BlindPrior(Protocol):
    """The best answers that need no image, scored as the policy's would be."""

    def fit(self, tasks: Iterable[Task]) -> None:
        """Learn from the training tasks."""

    def score(self, task: Task) -> Scored:
        """The score of the best answer to ``task``."""


def swapped(tasks: Sequence[Task], seed: int, *, same: bool) -> list[Task]:
    """Each task with the images of another task of its source, or of another source.

    A task without such another is left out.
    """
    order = [task for task in tasks if task.images]
    kind = "same page" if same else "other page"
    random.Random(derive(seed, "swapped images", kind)).shuffle(order)
    result = []
    for position, task in enumerate(order):
        donor = _donor(task, [*order[position + 1 :], *order[:position]], same)
        if donor is not None:
            result.append(_with_images(task, donor.images))
    return result


def _donor(task: Task, candidates: Iterable[Task], same: bool) -> Task | None:
    """The first candidate with other images, of the task's source or of another one."""
    for candidate in candidates:
        right_source = (candidate.source == task.source) == same
        if right_source and candidate.images != task.images:
            return candidate
    return None


def _with_images(task: Task, images: list[ImageSource]) -> Task:
    """The task with its k-th image replaced by the k-th of ``images``.

    They are repeated when there are fewer.
    """
    remaining = iter(images * len(task.images))
    messages = []
    for message in task.messages:
        parts = [
            next(remaining) if isinstance(part, ImageSource) else part for part in message.parts
        ]
        messages.append(replace(message, parts=tuple(parts)))
    return replace(task, messages=tuple(messages))


@dataclass(frozen=True)
class Item:
    """One answer of an evaluation, the ``sample``-th of its task and arm.

    ``cut``: ``sampling.max_tokens`` ended a turn of it. ``turns``: of the arm RIGHT, its turns
    after the prompt, in the format of ``rollouts``.
    """

    arm: str
    task: str
    source: str
    sample: int = 0
    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    unscored: str | None = None
    text: str = ""
    truth: Any = None
    images: tuple[Mapping[str, Any], ...] = ()
    cut: bool = False
    turns: tuple[Any, ...] = ()

    @property
    def key(self) -> tuple[str, str, int]:
        """Arm, task and sample: unique in an evaluation."""
        return self.arm, self.task, self.sample

    @property
    def scores(self) -> dict[str, float]:
        """The reward and its components; empty without a reward."""
        return {} if self.reward is None else {"reward": self.reward, **self.components}


Table = dict[str, dict[str, Interval]]
"""Arm (or source) -> score -> mean, lower and upper bound."""


def scores(items: Iterable[Item]) -> dict[str, dict[str, float]]:
    """Score -> task -> mean over the task's scored answers.

    They are sorted by task, so that a resampling does not depend on their order.
    """
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for item in sorted(items, key=lambda item: item.key):
        for name, value in item.scores.items():
            values[name][item.task].append(value)
    result = {}
    for name, by_task in values.items():
        result[name] = {task: sum(answers) / len(answers) for task, answers in by_task.items()}
    return result


def means(items: Iterable[Item]) -> dict[str, Interval]:
    """Score -> mean over tasks with its 95 % interval."""
    return {name: interval(list(by_task.values())) for name, by_task in scores(items).items()}


def by_column(items: Sequence[Item], values: Mapping[str, str]) -> Table:
    """The right image's scores by the values of a column; ``values``: id of a task -> value."""
    groups: dict[str, list[Item]] = defaultdict(list)
    for item in of_arm(items, RIGHT):
        groups[values.get(item.task, "")].append(item)
    return {value: means(groups[value]) for value in sorted(groups)}


def of_arm(items: Iterable[Item], arm: str) -> list[Item]:
    """The items of one arm."""
    return [item for item in items if item.arm == arm]


def over_cells(rows: Table) -> dict[str, float]:
    """Score -> mean of the rows' means, each weighing the same.

    It is the average of published tables with a cell for each kind.
    """
    cells: dict[str, list[float]] = defaultdict(list)
    for row in rows.values():
        for name, (mean, _, _) in row.items():
            cells[name].append(mean)
    return {name: fmean(means) for name, means in cells.items()}


@dataclass(frozen=True)
class Pair:
    """A score of the ``tasks`` common to two evaluations, with its means.

    ``gain`` is the mean paired difference with its interval.
    """

    tasks: int
    before: float
    after: float
    gain: Interval


def pairs(after: Iterable[Item], before: Iterable[Item]) -> dict[str, Pair]:
    """Score -> how the tasks that both have differ; scores without a common task are left out."""
    scores_after = scores(after)
    scores_before = scores(before)
    result = {}
    for name in scores_after.keys() & scores_before.keys():
        new = scores_after[name]
        old = scores_before[name]
        tasks = sorted(new.keys() & old.keys())
        if not tasks:
            continue
        new_means = [new[task] for task in tasks]
        old_means = [old[task] for task in tasks]
        result[name] = Pair(
            tasks=len(tasks),
            before=fmean(old_means),
            after=fmean(new_means),
            gain=paired_interval(new_means, old_means),
        )
    return result


def gains(after: Iterable[Item], before: Iterable[Item]) -> dict[str, Interval]:
    """Score -> mean difference over the tasks that both have, with its paired 95 % interval."""
    return {name: pair.gain for name, pair in pairs(after, before).items()}


def against_controls(items: Sequence[Item]) -> Table:
    """Control arm -> score -> right image minus that arm."""
    right = of_arm(items, RIGHT)
    differences = {arm: gains(right, of_arm(items, arm)) for arm in CONTROLS}
    return {arm: by_score for arm, by_score in differences.items() if by_score}


def looks(differences: Table) -> bool | None:
    """Whether the reward with the right image is above that of every control that was played.

    The intervals must exclude 0. None: undecided, since there is no other image of the same source,
    or fewer than ``MIN_ITEMS`` items.
    """
    lower_bounds = [by_score["reward"][1] for by_score in differences.values()]
    known_bounds = [bound for bound in lower_bounds if bound is not None]
    if not all(bound > 0 for bound in known_bounds):
        return False
    decided = SAME in differences and len(known_bounds) == len(lower_bounds)
    return True if decided else None


def by_source(items: Sequence[Item], before: Sequence[Item] = ()) -> dict[str, dict[str, Any]]:
    """Source with images -> its summary with the right image.

    Keys: ``items``, ``reward``, its ``differences`` from controls, whether the policy ``looks``,
    how many ``answers`` are distinct, how many are the ``commonest``, and ``change``: of the reward
    since ``before``.
    """
    shows_images = [item for item in items if item.arm in (SAME, OTHER) or item.images]
    result: dict[str, dict[str, Any]] = {}
    for source in sorted({item.source for item in shows_images}):
        items_now = [item for item in items if item.source == source]
        right = [item for item in of_arm(items_now, RIGHT) if item.reward is not None]
        if not right:
            continue
        right_before = [item for item in of_arm(before, RIGHT) if item.source == source]
        differences = against_controls(items_now)
        texts = Counter(item.text for item in right)
        result[source] = {
            "items": len(right),
            "reward": means(right)["reward"],
            "differences": {arm: by_score["reward"] for arm, by_score in differences.items()},
            "looks": looks(differences),
            "answers": len(texts),
            "commonest": max(texts.values()),
            "change": gains(right, right_before).get("reward"),
        }
    return result


def summarise(items: Sequence[Item], unscored: int, before: Sequence[Item] = ()) -> dict[str, Any]:
    """Means with their intervals by arm and by source, and the comparison with the controls.

    ``differences``: right image minus control. ``looks``: whether the policy looks, on average and
    on every source. ``before``: the items of an earlier evaluation, to compare with.
    """
    differences = against_controls(items)
    arms = dict.fromkeys(item.arm for item in items)
    sources = by_source(items, before) if differences else {}
    return {
        "items": len(of_arm(items, RIGHT)),
        "arms": {arm: means(of_arm(items, arm)) for arm in arms},
        "sources": by_column(items, {item.task: item.source for item in items}),
        "differences": differences,
        "by_source": sources,
        "looks": _looks_everywhere(differences, sources.values()),
        "unscored": unscored,
    }


def _looks_everywhere(differences: Table, sources: Iterable[Mapping[str, Any]]) -> bool | None:
    """Whether the policy looks on average and on every source; None where that is undecided."""
    verdicts = [looks(differences), *(source["looks"] for source in sources)]
    if False in verdicts:
        return False
    return None if None in verdicts or not differences else True


def pass_rates(
    items: Iterable[Item], score: str, least: float, arm: str = SAMPLED
) -> dict[int, Interval]:
    """k -> pass@k over tasks with its 95 % interval; empty without answers.

    k is 1, 2, 4, ... and the number of sampled answers, up to the answers of the task with fewest.
    An answer is right when its ``score`` is at least ``least``.
    """
    answers: dict[str, list[bool]] = defaultdict(list)
    for item in items:
        if item.arm == arm and score in item.scores:
            answers[item.task].append(item.scores[score] >= least)
    if not answers:
        return {}
    fewest = min(map(len, answers.values()))
    powers = {2**n for n in range(fewest.bit_length())}
    tasks = [answers[task] for task in sorted(answers)]
    rates = {}
    for k in sorted(powers | {fewest}):
        rates[k] = interval([pass_at(len(right), sum(right), k) for right in tasks])
    return rates


def solved_tasks(items: Iterable[Item], score: str, least: float) -> dict[str, tuple[int, int]]:
    """Task -> its right answers, and all that have the score.

    Only arms that show the right image count.
    """
    counts: dict[str, tuple[int, int]] = {}
    for item in items:
        if item.arm in (RIGHT, SAMPLED) and score in item.scores:
            right, total = counts.get(item.task, (0, 0))
            counts[item.task] = right + (item.scores[score] >= least), total + 1
    return counts
