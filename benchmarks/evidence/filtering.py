"""What filters cost and gain, at equal updates, at equal generated tokens and in equal seconds, on
three tasks.

    python -m benchmarks.evidence filtering      writes filtering.json beside it and prints the
    tables

Runs that are in the file are taken as they are: delete it to make them anew. ``digits`` and
``pages`` are tiny models in one process (``one_process``): steps of 8 x 8, sampled held-out
answers, CPU seconds without evaluations. First:

    python -m rayloop data prepare digits --out runs/data/digits; python -m rayloop sft
    recipes/digits/warm.yaml

``formula``: a policy that is a formula under the real RolloutManager. A task has 16 features and
one right answer of eight, which a hidden linear map names; a ninth answer is malformed. The policy
is the softmax of a linear map that begins as a poor copy of the hidden one; Adam moves it along the
GRPO gradient. Steps of 16 x 8, half of 512 tasks held out. Of its two learning rates the smaller
limits what a step learns by itself, at the larger the noise of the gradient does. All answers have
100 tokens. Seconds are those of a virtual clock: an episode lasts one on average (``World``), a
full batch is trained in ``TRAINING_MEANS``, of which answers with advantage 0 take nothing.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.evidence.costs import HEAD, Curve, Steps, broken, compared, noted, rows
from benchmarks.evidence.runs import write
from benchmarks.evidence.staleness import GROUP, GROUPS, TASKS, TRAINING_MEANS, World
from benchmarks.virtual_time import VirtualLoop
from rayloop.config.settings import load
from rayloop.core.deadlines import background
from rayloop.core.groups import Group, Outcome, Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import RolloutRequest, Task, Trajectory, Version
from rayloop.recipes.arc_vision.reward import IoUReward
from rayloop.recipes.digits.data import SortReward
from rayloop.run.config import RunConfig

RESULT = Path(__file__).with_suffix(".json")
HERE = "benchmarks.evidence.filtering"
EQUAL, MEMBERS, WHOLE = (
    {"kind": "equal_rewards"},
    {"use": f"{HERE}:Members"},
    {"use": f"{HERE}:WholeGroup"},
)


@dataclass(frozen=True)
class Arm:
    """A way of filtering.

    ``groups``: that a step trains, in those of the task's step; ``started`` at once (None: what is
    missing), in the same.
    """

    filters: tuple[dict[str, str], ...] = ()
    ranking: str = "fifo"
    groups: float = 1.0
    started: float | None = None


NONE = "none"
ARMS = {
    NONE: Arm(),
    "none, half as many more": Arm(groups=1.5),
    "equal rewards": Arm((EQUAL,)),
    "partial": Arm((EQUAL, MEMBERS)),
    "whole group": Arm((EQUAL, WHOLE)),
    "partial, ranked": Arm((EQUAL, MEMBERS), "std"),
    "partial, ranked, half as many more": Arm((EQUAL, MEMBERS), "std", started=1.5),
}
"""A step is refilled until it is full."""
STARTS: dict[str, float] = {}
"""Held-out scores before the first step."""
RIGHT_OVERLAP = 0.5
"""The intersection over union from which a box counts as right."""
FEATURES, ANSWERS, EVERY = 16, 8, 5
BROKEN_ANSWER = ANSWERS
"""The malformed answer: one in twelve at first."""


@dataclass(frozen=True)
class Learner:
    """A task: updates that arms are compared after, groups of a step, seeds, and the configuration
    of a tiny model or the formula's learning rate.
    """

    steps: int
    groups: int
    seeds: range
    rate: float = 0.0
    config: str = ""
    overrides: tuple[str, ...] = ()

    def updates(self, arm: str) -> int:
        """Of a run: in the first arm twice as many, so that the others' tokens and seconds lie
        within its own.
        """
        return 2 * self.steps if arm == NONE else self.steps


LEARNERS = {
    "digits": Learner(
        30,
        8,
        range(5),
        config="recipes/digits/quickstart.yaml",
        overrides=(
            "rollout.sampling={max_tokens: 10, temperature: 0.8}",
            "rollout.engine.max_sequences=256",
            f"reward.source={{use: '{HERE}:Exact'}}",
            "evaluation={every: 15, limit: 100, samples: 4}",
        ),
    ),
    "pages": Learner(
        20,
        8,
        range(5),
        config="recipes/arc_vision/quickstart.yaml",
        overrides=(
            "policy.optimizer.schedule=constant",
            f"reward.source={{use: '{HERE}:HalfOverlap'}}",
            "evaluation={every: 10, samples: 3}",
        ),
    ),
    "formula, learning rate 0.01": Learner(60, GROUPS, range(6), rate=0.01),
    "formula, learning rate 0.05": Learner(60, GROUPS, range(6), rate=0.05),
}


class Exact:
    """1 when all digits are right, else 0: groups are often right or wrong throughout."""

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        """The component ``exact`` of SortReward as the reward."""
        found = SortReward().score(trajectory, task, context)
        return (
            Scored(found.components["exact"], {}, found.flags)
            if isinstance(found, Scored)
            else found
        )


class HalfOverlap:
    """1 when the answered box and the true one have an intersection over union of at least
    ``RIGHT_OVERLAP``, else 0.
    """

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        """The reward of IoUReward as right or wrong."""
        found = IoUReward().score(trajectory, task, context)
        return (
            Scored(float(found.value >= RIGHT_OVERLAP), {}, found.flags)
            if isinstance(found, Scored)
            else found
        )


class Members:
    """Refuse the answers that cannot be read, as PyVision refuses broken trajectories: the others
    of the group stay.
    """

    def refused(self, group: Group) -> Mapping[int, str]:
        """Index of each unparsable member -> reason."""
        return {
            i: "unparsable"
            for i, member in enumerate(group.members)
            if member.kept and broken(member)
        }


class WholeGroup:
    """Refuse a whole group in which one answer is refused."""

    def refused(self, group: Group) -> Mapping[int, str]:
        """Index of each kept member -> reason, when ``Members`` refuses one of them."""
        kept = [i for i, member in enumerate(group.members) if member.kept]
        return dict.fromkeys(kept, "group") if Members().refused(group) else {}


class Learning(World):
    """A world whose answers come from a policy that learns."""

    def __init__(self, folder: Path, seed: int, rate: float, algorithm: dict[str, Any]) -> None:
        super().__init__(folder, seed=seed, **algorithm)
        self.rate, drawn = rate, np.random.default_rng(seed)
        self.features = np.hstack([drawn.normal(size=(TASKS, FEATURES)), np.ones((TASKS, 1))])
        hidden = drawn.normal(size=(FEATURES + 1, ANSWERS + 1))
        hidden[-1], hidden[:, BROKEN_ANSWER] = 0, 0
        self.right = (self.features @ hidden[:, :BROKEN_ANSWER]).argmax(axis=1)
        self.weights = 0.3 * hidden + 0.3 * drawn.normal(size=hidden.shape)
        self.first, self.second = np.zeros_like(hidden), np.zeros_like(hidden)
        self.held_out = np.arange(1, TASKS, 2)
        self.said: dict[tuple[int, int], int] = {}

    def chances(self, task: Any) -> np.ndarray:
        """[..., ANSWERS + 1], of each answer to one task or several."""
        raised = np.exp(self.features[task] @ self.weights)
        return raised / raised.sum(axis=-1, keepdims=True)

    def success(self) -> float:
        """Over the held-out tasks."""
        return float(
            self.chances(self.held_out)[
                np.arange(len(self.held_out)), self.right[self.held_out]
            ].mean()
        )

    def outcome(self, request: RolloutRequest) -> Scored:
        """1 for the right answer, 0 for another; the answer is drawn from the policy."""
        task = self.index(request.task.id)
        answer = int(np.random.default_rng(request.seed).choice(ANSWERS + 1, p=self.chances(task)))
        self.said[request.id.group, request.id.sample] = answer
        return Scored(
            float(answer == self.right[task]),
            {},
            ("unparsable",) if answer == BROKEN_ANSWER else (),
        )

    @staticmethod
    def index(task: str) -> int:
        """Training rows stand for the tasks of even number."""
        return 2 * (int(task) % (TASKS // 2))

    def update(self, groups: tuple[Group, ...], step: int) -> float:
        """Adam, one step along the mean of advantage * gradient of the log-probability.

        Returns the gradient's norm.
        """
        gradient, members = (
            np.zeros_like(self.weights),
            [(group.task.id, m) for group in groups for m in group.kept],
        )
        for name, member in members:
            assert member.advantage is not None
            task, id = self.index(name), member.summary.id
            slope = np.eye(ANSWERS + 1)[self.said[id.group, id.sample]] - self.chances(task)
            gradient += member.advantage / len(members) * np.outer(self.features[task], slope)
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        moved = self.first / (1 - 0.9**step) / (np.sqrt(self.second / (1 - 0.999**step)) + 1e-8)
        self.weights = self.weights + self.rate * moved
        return float(np.linalg.norm(gradient))

    async def learn(self, steps: int, compared: int) -> Curve:
        """The held-out success after each of so many steps."""
        clock, spent, scores = asyncio.get_running_loop().time, Steps(), [self.success()]
        async with background(self.rollouts.run(self, self.finish)):
            for step in range(1, steps + 1):
                began = clock()
                collected = await self.rollouts.collect(self.version, {})
                trained = [member for group in collected.groups for member in group.kept]
                norm = self.update(collected.groups, step)
                await asyncio.sleep(
                    TRAINING_MEANS
                    * sum(member.advantage != 0 for member in trained)
                    / (GROUPS * GROUP)
                )
                self.rollouts.ready.settle_trained(collected.groups)
                self.version = Version(1, step)
                self.rollouts.synced(self.version)
                noted(spent, collected.ended_groups, trained, norm, clock() - began)
                if step % EVERY == 0:
                    scores.append(self.success())
        self.rollouts.close()
        return Curve.of(spent, scores, EVERY, compared)


def algorithm(learner: Learner, arm: str) -> dict[str, Any]:
    """``algorithm`` of an arm."""
    chosen = ARMS[arm]
    started = int(chosen.started * learner.groups) if chosen.started else None
    return {
        "groups_per_step": int(chosen.groups * learner.groups),
        "filtering": {
            "filters": chosen.filters,
            "ranking": chosen.ranking,
            "groups_per_generation": started,
            "min_fraction": 0.05,
            "max_generation_batches": 16,
        },
    }


def configuration(learner: Learner, arm: str, seed: int) -> RunConfig:
    """A tiny model's run."""
    overrides = [
        f"steps={learner.updates(arm)}",
        f"seed={seed}",
        "algorithm.group_size=8",
        "rollout.engine.threads=1",
        "policy.engine.threads=1",
        *(f"algorithm.{key}={json.dumps(value)}" for key, value in algorithm(learner, arm).items()),
    ]
    return load(Path(learner.config), [*overrides, *learner.overrides], RunConfig)


def curve(learner: Learner, arm: str, seed: int) -> Curve:
    """One run of an arm."""
    with tempfile.TemporaryDirectory() as folder:
        if learner.config:
            from benchmarks.evidence.one_process import OneProcess

            run = OneProcess(configuration(learner, arm, seed), Path(folder))
            return asyncio.run(run.learn(learner.steps, STARTS))
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            formula = Learning(Path(folder), seed, learner.rate, algorithm(learner, arm))
            return runner.run(formula.learn(learner.updates(arm), learner.steps))


def main() -> None:
    """Make the runs that filtering.json lacks, a seed of all tasks after the other, and print the
    tables.
    """
    found = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    for seed in sorted({seed for learner in LEARNERS.values() for seed in learner.seeds}):
        for name, learner in LEARNERS.items():
            of_task = found.setdefault(name, {"runs": {}})
            for arm in ARMS if seed in learner.seeds else ():
                by_seed = of_task["runs"].setdefault(arm, {})
                if str(seed) not in by_seed:
                    by_seed[str(seed)] = asdict(curve(learner, arm, seed))
                    print(name, arm, seed, by_seed[str(seed)]["scores"], flush=True)
                curves = {
                    arm: {seed: Curve(**run) for seed, run in runs.items()}
                    for arm, runs in of_task["runs"].items()
                }
                of_task["compared"] = compared({arm: curves[arm] for arm in ARMS if arm in curves})
                write(RESULT, found, levels=4)
    for name, of_task in found.items():
        print(name, *HEAD, *rows(of_task["compared"]), sep="\n")
