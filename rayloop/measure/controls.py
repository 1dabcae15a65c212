"""Evaluation against controls: a policy looks only if the right image scores higher than another
image of the same kind, than one of another kind, and than the best answer without any (the blind
prior), each beyond chance. Also pass@k of answers.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Protocol

from rayloop.core.groups import Scored
from rayloop.core.types import ImageSource, Task, derive
from rayloop.measure.intervals import LEAST, Interval, interval, paired_interval, pass_at

RIGHT, SAME, OTHER, BLIND, SAMPLED = "right", "same source", "other source", "blind", "sampled"
"""Arms: the right image; another of the same source; one of another source; the blind prior; the
right image, sampled.
"""
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
NAMED = 12
"""Sources that a sentence names."""


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
    random.Random(derive(seed, "swapped images", "same page" if same else "other page")).shuffle(
        order
    )
    result = []
    for position, task in enumerate(order):
        others = (*order[position + 1 :], *order[:position])
        fits = (o for o in others if (o.source == task.source) == same and o.images != task.images)
        if (other := next(fits, None)) is not None:
            result.append(_with_images(task, other.images))
    return result


def _with_images(task: Task, images: list[ImageSource]) -> Task:
    """The task with its k-th image replaced by the k-th of ``images``, which are repeated when
    there are fewer.
    """
    remaining = iter(images * len(task.images))
    return replace(
        task,
        messages=tuple(
            replace(
                m,
                parts=tuple(next(remaining) if isinstance(p, ImageSource) else p for p in m.parts),
            )
            for m in task.messages
        ),
    )


@dataclass(frozen=True, slots=True)
class Item:
    """One answer of an evaluation, the ``sample``-th of its task and arm.

    ``cut``: ``sampling.max_tokens`` ended a turn of it. ``turns``: of the arm RIGHT, its turns
    after the prompt, as in ``rollouts``.
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
    """Score -> task -> mean over the task's scored answers, sorted by task, so that a resampling
    does not depend on their order.
    """
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for item in sorted(items, key=lambda item: item.key):
        for name, value in item.scores.items():
            values[name][item.task].append(value)
    return {name: {task: sum(v) / len(v) for task, v in by.items()} for name, by in values.items()}


def means(items: Iterable[Item]) -> dict[str, Interval]:
    """Score -> mean over tasks with its 95 % interval."""
    return {name: interval(list(by_task.values())) for name, by_task in scores(items).items()}


def by_column(items: Sequence[Item], values: Mapping[str, str]) -> Table:
    """The right image's scores by the values of a column; ``values``: id of a task -> value."""
    right = [item for item in items if item.arm == RIGHT]
    kinds = sorted({values.get(item.task, "") for item in right})
    return {
        kind: means(item for item in right if values.get(item.task, "") == kind) for kind in kinds
    }


def over_cells(rows: Table) -> dict[str, float]:
    """Score -> mean of the rows' means, each weighing the same: the average of published tables
    with a cell for each kind.
    """
    names = dict.fromkeys(name for row in rows.values() for name in row)
    return {name: fmean(row[name][0] for row in rows.values() if name in row) for name in names}


@dataclass(frozen=True, slots=True)
class Pair:
    """A score of the ``tasks`` common to two evaluations: its means, and ``gain``, the mean paired
    difference with its interval.
    """

    tasks: int
    before: float
    after: float
    gain: Interval


def pairs(after: Iterable[Item], before: Iterable[Item]) -> dict[str, Pair]:
    """Score -> how the tasks that both have differ; scores without a common task are left out."""
    new, old = scores(after), scores(before)
    result = {}
    for name in new.keys() & old.keys():
        if common := sorted(new[name].keys() & old[name].keys()):
            late, early = [new[name][t] for t in common], [old[name][t] for t in common]
            result[name] = Pair(
                len(common), fmean(early), fmean(late), paired_interval(late, early)
            )
    return result


def gains(after: Iterable[Item], before: Iterable[Item]) -> dict[str, Interval]:
    """Score -> mean difference over the tasks that both have, with its paired 95 % interval."""
    return {name: pair.gain for name, pair in pairs(after, before).items()}


def against_controls(items: Sequence[Item]) -> Table:
    """Control arm -> score -> right image minus that arm."""
    arms = {arm: [item for item in items if item.arm == arm] for arm in (RIGHT, *CONTROLS)}
    differences = {arm: gains(arms[RIGHT], arms[arm]) for arm in CONTROLS}
    return {arm: by for arm, by in differences.items() if by}


def looks(differences: Table) -> bool | None:
    """Whether the reward with the right image is above that of every control that was played, with intervals that exclude 0. None:
    undecided, for want of another image of the same source, or of ``LEAST`` items.
    """
    enough = [by for by in differences.values() if by["reward"][1] is not None]
    if not all(map(_above, enough)):
        return False
    return True if SAME in differences and len(enough) == len(differences) else None


def _above(difference: Mapping[str, Interval]) -> bool:
    low = difference["reward"][1]
    return low is not None and low > 0


def by_source(items: Sequence[Item], before: Sequence[Item] = ()) -> dict[str, dict[str, Any]]:
    """Source with images -> ``items``, ``reward`` with the right image, its ``differences`` from
    controls, whether the policy ``looks``, how many ``answers`` are distinct, how many are the
    ``commonest``, and ``change``: of the reward since ``before``.
    """
    found: dict[str, dict[str, Any]] = {}
    for source in sorted(
        {item.source for item in items if item.arm in (SAME, OTHER) or item.images}
    ):
        now, then = ([item for item in group if item.source == source] for group in (items, before))
        right = [item for item in now if item.arm == RIGHT and item.reward is not None]
        if not right:
            continue
        differences = against_controls(now)
        texts = Counter(item.text for item in right)
        found[source] = {
            "items": len(right),
            "reward": means(right)["reward"],
            "differences": {arm: by["reward"] for arm, by in differences.items()},
            "looks": looks(differences),
            "answers": len(texts),
            "commonest": max(texts.values()),
            "change": gains(right, [item for item in then if item.arm == RIGHT]).get("reward"),
        }
    return found


def summarise(items: Sequence[Item], unscored: int, before: Sequence[Item] = ()) -> dict[str, Any]:
    """Means with their intervals by arm and by source, ``differences`` (right image minus control),
    and whether it ``looks``: on average, and on every source. ``before``: the items of an earlier
    evaluation, to compare with.
    """
    differences, arms = against_controls(items), list(dict.fromkeys(item.arm for item in items))
    sources = by_source(items, before) if differences else {}
    judged = [looks(differences), *(one["looks"] for one in sources.values())]
    return {
        "items": sum(item.arm == RIGHT for item in items),
        "arms": {arm: means(item for item in items if item.arm == arm) for arm in arms},
        "sources": by_column(items, {item.task: item.source for item in items}),
        "differences": differences,
        "by_source": sources,
        "looks": False if False in judged else None if None in judged or not differences else True,
        "unscored": unscored,
    }


def table(summary: dict[str, Any]) -> list[str]:
    """The summary as lines of text.

    Where the run names a score (``evaluation.solved``), tables have that one, and a line the means
    of the others. Sources are shown where no other column is asked for.
    """
    arms, by, main = (
        summary["arms"],
        summary.get("by", {}),
        summary.get("solved", "").partition(" ")[0],
    )
    first = next(iter(arms), "")
    only = (main,) if main != "reward" and all(main in row for row in arms.values()) else ()
    lines = [
        f"{summary['items']} items, mean and 95 % interval (bootstrap over items)",
        *_rows("", arms, only),
    ]
    if only and (
        others := [
            f"{score} {found[0]:.3f}"
            for score, found in arms.get(first, {}).items()
            if score != main
        ]
    ):
        lines.append(f"other means, {first}: " + "  ".join(others))
    if not by and len(summary["sources"]) > 1:
        lines += ["by source, right image:", *_rows("  ", summary["sources"], only)]
    for column, rows in by.items():
        lines += [f"by {column}, right image:", *_rows("  ", rows, only)]
        if average := summary.get("cells", {}).get(column):
            means = (
                f"{score} {mean:.3f}"
                for score, mean in average.items()
                if score in (only or average)
            )
            lines.append(f"  mean of these {len(rows)}  " + "  ".join(means))
    for k, found in summary.get("pass_at", {}).items():
        lines.append(f"pass@{k}  {_shown(found)}  (an answer is right with {summary['solved']})")
    if cut := summary.get("cut"):
        lines.append(
            f"{cut} answers were cut by sampling.max_tokens; --retries N plays them again with more"
            " room"
        )
    if differences := summary["differences"]:
        lines += [
            "right image minus control, paired:",
            *_rows("  ", differences),
            *_source_rows(summary),
            verdict(summary),
        ]
    if summary["unscored"]:
        lines.append(
            f"{summary['unscored']} answers have no score; run again once the reason in"
            " events.jsonl is removed"
        )
    return lines


def verdict(summary: Mapping[str, Any]) -> str:
    """On how many sources the policy looks; where it was not shown to look, where that is
    undecided, and where it got worse.
    """
    sources: Mapping[str, Mapping[str, Any]] = summary.get("by_source") or {}
    differences: Table = summary["differences"]
    said = [_by_source(sources, differences) if len(sources) > 1 else _on_average(differences)]
    worse = {
        name: one["change"]
        for name, one in sources.items()
        if one["change"] and one["change"][0] < 0
    }
    sure = {
        name: f"{name} {_shown(change)}"
        for name, change in worse.items()
        if change[2] is not None and change[2] < 0
    }
    if sure:
        said.append(f"Worse than at the first evaluation: {_some(sure.values())}.")
    if chance := [f"{name} {_shown(change)}" for name, change in worse.items() if name not in sure]:
        said.append(f"Lower than at the first evaluation, which may be chance: {_some(chance)}.")
    if missing := [why for arm, why in NOT_PLAYED.items() if arm not in differences]:
        said.append(f"Not compared with {'; nor with '.join(missing)}.")
    return " ".join(said)


def _by_source(sources: Mapping[str, Mapping[str, Any]], differences: Table) -> str:
    by: dict[bool | None, list[str]] = {True: [], False: [], None: []}
    for name, one in sources.items():
        by[one["looks"]].append(name)
    few = f"fewer than {LEAST} tasks, or no other image of the source"
    if len(by[None]) == len(sources):
        return (
            f"{_on_average(differences)} That is a mean over {len(sources)} sources; on which it"
            f" holds is undecided ({few})."
        )
    count = f"{len(by[True])} of {len(sources)} sources"
    said = [
        f"The policy looks on {count}: there the right image scores above every control, and no"
        " interval holds 0."
    ]
    if not by[True]:
        said = [
            f"No evidence that the policy looks: on none of {len(sources)} sources is the right"
            " image above every control."
        ]
    if by[False]:
        said.append(
            f"Not shown to look: {_some(_weakest(name, sources[name]) for name in by[False])}."
        )
    if by[None]:
        said.append(f"Undecided ({few}): {_some(by[None])}.")
    return " ".join(said)


def _weakest(name: str, one: Mapping[str, Any]) -> str:
    """A source, the control whose interval reaches lowest, and how many answers it gave."""
    bounded = {arm: found for arm, found in one["differences"].items() if found[1] is not None}
    arm, found = min(bounded.items(), key=lambda pair: float(pair[1][1]))
    answers = f"{one['answers']} distinct answers to {one['items']} tasks"
    return f"{name} ({_shown(found)} against {WORDS[arm]}; {answers})"


def _some(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    known = list(names)
    return ", ".join(known[:NAMED]) + (
        f" and {len(known) - NAMED} more" if len(known) > NAMED else ""
    )


def _on_average(differences: Table) -> str:
    """One sentence on whether the policy looks, over all sources."""
    judged = looks(differences)
    if judged:
        above = ", ".join(WORDS[arm] for arm in differences)
        return f"The policy looks: the right image scores above {above}; no interval holds 0."
    if judged is False:
        failing = [
            WORDS[arm]
            for arm, by in differences.items()
            if by["reward"][1] is not None and not _above(by)
        ]
        return (
            f"No evidence that the policy looks: the right image is not above {', '.join(failing)}."
        )
    few = [WORDS[arm] for arm, by in differences.items() if by["reward"][1] is None]
    if few:
        return (
            f"Too few items to say whether the policy looks: fewer than {LEAST} for"
            f" {', '.join(few)}."
        )
    return "Whether the policy looks is undecided."


def _rows(indent: str, rows: Table, only: Sequence[str] = ()) -> list[str]:
    """A line of each row, with all scores or those of ``only``."""
    width = max((len(name) for name in rows), default=0)
    return [
        f"{indent}{name:<{width}}  "
        + "  ".join(f"{score} {_shown(by[score])}" for score in only or by if score in by)
        for name, by in rows.items()
    ]


JUDGED = {True: "looks", False: "not shown to look", None: "undecided"}


def _source_rows(summary: Mapping[str, Any]) -> list[str]:
    """A line of each source, where there are several: the right image's reward minus each control."""
    sources = summary.get("by_source") or {}
    if len(sources) < 2:
        return []
    width, lines = max(map(len, sources)), ["the same by source, reward alone:"]
    for name, one in sources.items():
        over = "  ".join(f"{arm} {_shown(found)}" for arm, found in one["differences"].items())
        change = f"  change {_shown(one['change'])}" if one["change"] else ""
        answers = f"{one['answers']} answers to {one['items']}"
        lines.append(f"  {name:<{width}}  {JUDGED[one['looks']]:<17}  {over}  {answers}{change}")
    return lines


def _shown(found: Interval) -> str:
    mean, low, high = found
    return (
        f"{mean:.3f} [{low:.3f}, {high:.3f}]" if low is not None else f"{mean:.3f} [too few items]"
    )


def pass_rates(
    items: Iterable[Item], score: str, least: float, arm: str = SAMPLED
) -> dict[int, Interval]:
    """k -> pass@k over tasks with its 95 % interval, for k = 1, 2, 4, ... and the number of sampled
    answers; empty without any. An answer is right when its ``score`` is at least ``least``. k goes
    up to the answers of the task with fewest.
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


def solved_tasks(items: Iterable[Item], score: str, least: float) -> dict[str, tuple[int, int]]:
    """By task: its right answers, and all that have the score, of the arms that show the right
    image.
    """
    found: dict[str, tuple[int, int]] = {}
    for item in items:
        if item.arm in (RIGHT, SAMPLED) and score in item.scores:
            right, played = found.get(item.task, (0, 0))
            found[item.task] = right + (item.scores[score] >= least), played + 1
    return found
