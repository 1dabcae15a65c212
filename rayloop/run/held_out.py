"""What an evaluation asks for, and what its answers amount to: arms, the blind prior, metrics.

Nothing is played here.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rayloop.config.settings import Component
from rayloop.core.types import Sampling, Task
from rayloop.data.dataset import Dataset
from rayloop.measure.controls import (
    BLIND,
    CONTROLS,
    OTHER,
    RIGHT,
    SAME,
    SAMPLED,
    BlindPrior,
    Item,
    of_arm,
    pairs,
    swapped,
)
from rayloop.measure.intervals import Interval
from rayloop.run.config import RunConfig
from rayloop.run.folder import is_answer
from rayloop.run.records.jsonl import JsonLines
from rayloop.run.records.rollouts import jsonable


@dataclass(frozen=True)
class AnswerRequest:
    """One answer to ask for."""

    arm: str
    task: Task
    sampling: Sampling
    sample: int = 0


def answer_requests(
    config: RunConfig, tasks: Sequence[Task], *, controls: bool, samples: int
) -> list[AnswerRequest]:
    """An answer per task with the right image, and the further ones that are asked for.

    With ``controls`` there are also answers with swapped images, and ``samples`` sampled answers
    per task. Without ``evaluation.greedy`` all are sampled and of the arm RIGHT, and the first
    answer is one of the ``samples``.
    """
    greedy = config.evaluation.greedy
    settings = config.in_evaluation.rollout.sampling
    sampling = settings.sampling(greedy=greedy)
    arms = {RIGHT: list(tasks)}
    if controls:
        arms |= {
            SAME: swapped(tasks, config.seed, same=True),
            OTHER: swapped(tasks, config.seed, same=False),
        }
    requests = [
        AnswerRequest(arm, task, sampling) for arm, members in arms.items() for task in members
    ]
    arm, first, drawn = (SAMPLED, 0, settings.sampling()) if greedy else (RIGHT, 1, sampling)
    return requests + [
        AnswerRequest(arm, task, drawn, sample)
        for sample in range(first, samples)
        for task in tasks
    ]


def read_items(file: Path) -> list[Item]:
    """The items of an evaluation on record.

    ``file`` is ``evaluations/step_N.jsonl`` of a run, or ``items.jsonl`` of ``eval``.
    """
    names = {field.name for field in dataclasses.fields(Item)}
    items: list[Item] = []
    for record in JsonLines(file, is_answer):
        values = {name: value for name, value in record.items() if name in names}
        items.append(Item(**{"source": "", **values}))
    return items


def on_training_rows(config: RunConfig) -> str:
    """A warning when the run is evaluated on the file that it trains on, else ""."""
    train = config.data.train
    held_out = config.data.eval
    if not config.evaluation.every or held_out is None or not Path(held_out).samefile(train):
        return ""
    return (
        f"data.eval is data.train ({train}): what is reported as held out was trained on, and says"
        " nothing about other tasks. Name rows that are not trained on, or set"
        " evaluation.every=0"
    )


def never_evaluated(config: RunConfig) -> str:
    """That held-out rows are named and not used, when they are; else ""."""
    if config.data.eval is None or config.evaluation.every:
        return ""
    return (
        f"data.eval names {config.data.eval}, and with evaluation.every: 0 the run never evaluates;"
        " set it to a number of steps"
    )


def blind(component: Component | None, train: Dataset, tasks: Sequence[Task]) -> list[Item]:
    """The items of the blind prior (``evaluation.blind``); none without one."""
    if component is None:
        return []
    prior: BlindPrior = component.build()
    prior.fit(train)
    scores = [(task, prior.score(task)) for task in tasks]
    return [
        Item(
            BLIND,
            t.id,
            t.source,
            reward=s.value,
            components=s.components,
            truth=jsonable(t.ground_truth),
        )
        for t, s in scores
    ]


def metrics(items: Sequence[Item], table: dict[str, Any]) -> dict[str, float]:
    """The metrics of an evaluation.

    val/reward/mean, val/<source>/reward/mean, val/<component>/mean of the right image,
    val_sampled/... of its sampled answers, and val/control/<arm>/... Answers without a score are
    left out of the means and counted in val/unscored.
    """
    right = of_arm(items, RIGHT)
    drawn = of_arm(items, SAMPLED)
    names = _curve("val", right, table.get(RIGHT, {}))
    for source in sorted({item.source for item in right} - {""}):
        rewards = [
            item.reward for item in right if item.source == source and item.reward is not None
        ]
        if rewards:
            names[f"val/{source}/reward/mean"] = mean(rewards)
    for arm in CONTROLS:
        names |= {
            f"val/control/{arm}/{name}/mean": value[0] for name, value in table.get(arm, {}).items()
        }
    return {**names, **(_curve("val_sampled", drawn, table.get(SAMPLED, {})) if drawn else {})}


def _curve(prefix: str, items: Sequence[Item], scores: Mapping[str, Interval]) -> dict[str, float]:
    """The means of one arm, the bounds of its reward's interval, and its numbers of answers.

    An arm may have no interval.
    """
    names = {f"{prefix}/{name}/mean": value[0] for name, value in scores.items()}
    _, low, high = scores.get("reward", (0.0, None, None))
    if low is not None and high is not None:
        names |= {f"{prefix}/reward/low": low, f"{prefix}/reward/high": high}
    scored = sum(item.reward is not None for item in items)
    return {
        **names,
        f"{prefix}/scored": float(scored),
        f"{prefix}/unscored": float(len(items) - scored),
    }


def gain(
    after: Sequence[Item], before: Sequence[Item], *, greedy: bool
) -> dict[str, dict[str, Any]]:
    """How the rewards of two evaluations differ (``Pair``), for ``sampled`` and ``greedy``.

    An arm without common tasks is left out.
    """
    arms = {"sampled": SAMPLED, "greedy": RIGHT} if greedy else {"sampled": RIGHT}
    result = {}
    for name, arm in arms.items():
        pair = pairs(of_arm(after, arm), of_arm(before, arm)).get("reward")
        if pair is not None:
            result[name] = dataclasses.asdict(pair)
    return result
