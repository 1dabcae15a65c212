"""What filtering and ranking cost and gain: a policy that is a formula under the real RolloutManager, advantages, filters.

    python -m benchmarks.evidence filtering      writes benchmarks/evidence/filtering.json and prints the table

A task has 16 features and one right answer of eight, which a hidden linear map names. The policy is the softmax of a linear map
that begins as a poor copy of the hidden one; Adam moves it along the GRPO gradient. Steps of 16 x 8, half of 512 tasks held out.
All answers are as long as each other: generated answers stand for generated tokens. Of the two learning rates the smaller limits
what a step learns by itself, at the larger the noise of the gradient does.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.evidence.staleness import GROUPS, TASKS, World
from benchmarks.virtual_time import VirtualLoop
from rayloop.core.deadlines import background
from rayloop.core.groups import Group
from rayloop.core.types import RolloutRequest, Version

RESULT = Path(__file__).with_suffix(".json")
STEPS, SEEDS, FEATURES, ANSWERS = 100, range(6), 16, 8
LEVELS = {0.01: 0.50, 0.05: 0.65}
"""By learning rate, the held-out success whose price is asked for."""
PLAIN: dict[str, Any] = {"filters": [], "ranking": "fifo"}
Curve = list[tuple[int, int, float]]
ARMS: dict[str, dict[str, Any]] = {
    "neither": PLAIN,
    "filter": {"ranking": "fifo"},
    "filter, ranking": {},
    "filter, ranking, twice as many played": {"groups_per_generation": 2 * GROUPS},
}


class Learning(World):
    """A world whose answers come from a policy that learns."""

    def __init__(self, folder: Path, seed: int, rate: float, filtering: dict[str, Any]) -> None:
        super().__init__(folder, seed=seed, filtering={"max_generation_batches": 32, **filtering})
        self.rate, drawn = rate, np.random.default_rng(seed)
        self.features = drawn.normal(size=(TASKS, FEATURES))
        hidden = drawn.normal(size=(FEATURES, ANSWERS))
        self.right = (self.features @ hidden).argmax(axis=1)
        self.weights = 0.3 * hidden + 0.3 * drawn.normal(size=hidden.shape)
        self.first, self.second = np.zeros_like(hidden), np.zeros_like(hidden)
        self.held_out = np.arange(1, TASKS, 2)
        self.said: dict[tuple[int, int], int] = {}

    def chances(self, task: Any) -> np.ndarray:
        """[..., ANSWERS], of each answer to one task or several."""
        raised = np.exp(self.features[task] @ self.weights)
        return raised / raised.sum(axis=-1, keepdims=True)

    def success(self) -> float:
        """Over the held-out tasks."""
        return float(self.chances(self.held_out)[np.arange(len(self.held_out)), self.right[self.held_out]].mean())

    def reward(self, request: RolloutRequest) -> float:
        """1 for the right answer, 0 for another; the answer is drawn from the policy."""
        task = self.index(request.task.id)
        answer = int(np.random.default_rng(request.seed).choice(ANSWERS, p=self.chances(task)))
        self.said[request.id.group, request.id.sample] = answer
        return float(answer == self.right[task])

    @staticmethod
    def index(task: str) -> int:
        """Training rows stand for the tasks of even number."""
        return 2 * (int(task) % (TASKS // 2))

    def update(self, groups: tuple[Group, ...], step: int) -> None:
        """Adam, one step along the mean of advantage * gradient of the log-probability."""
        gradient, members = np.zeros_like(self.weights), [(group.task.id, m) for group in groups for m in group.kept]
        for name, member in members:
            assert member.advantage is not None
            task, id = self.index(name), member.summary.id
            slope = np.eye(ANSWERS)[self.said[id.group, id.sample]] - self.chances(task)
            gradient += member.advantage / len(members) * np.outer(self.features[task], slope)
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        moved = self.first / (1 - 0.9**step) / (np.sqrt(self.second / (1 - 0.999**step)) + 1e-8)
        self.weights = self.weights + self.rate * moved

    async def learn(self) -> Curve:
        """(answers generated so far, answers trained so far, held-out success) after each step."""
        points, trained = [(0, 0, self.success())], 0
        async with background(self.rollouts.run(self, self.finish)):
            for step in range(1, STEPS + 1):
                groups = (await self.rollouts.collect(self.version, {})).groups
                self.update(groups, step)
                self.rollouts.ready.settle_trained(groups)
                trained += sum(len(group.kept) for group in groups)
                self.version = Version(1, step)
                self.rollouts.synced(self.version)
                points.append((self.ledger.counts()["issued"], trained, self.success()))
        self.rollouts.close()
        return points


def curve(arm: str, rate: float, seed: int) -> Curve:
    """The points of one run of an arm."""
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(Learning(Path(folder), seed, rate, ARMS[arm]).learn())


def price(points: Curve, level: float) -> tuple[int, int]:
    """(steps, generated answers) until the held-out success reached ``level``; those of the last step when it did not."""
    step = next((step for step, point in enumerate(points) if point[2] >= level), len(points) - 1)
    return step, points[step][0]


def summary(curves: list[Curve], neither: list[Curve], level: float) -> dict[str, Any]:
    """Means over seeds; differences to ``neither`` are paired by seed and have their standard error beside them."""
    prices = [(price(ours, level), price(theirs, level)) for ours, theirs in zip(curves, neither, strict=True)]
    return {
        "generated_per_trained": round(float(np.mean([c[-1][0] / c[-1][1] for c in curves])), 2),
        "success_after": round(float(np.mean([c[-1][2] for c in curves])), 3),
        "success_gained": _mean([ours[-1][2] - theirs[-1][2] for ours, theirs in zip(curves, neither, strict=True)]),
        "steps_to_level": _mean([ours[0] / theirs[0] for ours, theirs in prices]),
        "answers_to_level": _mean([ours[1] / theirs[1] for ours, theirs in prices]),
    }


def _mean(values: list[float]) -> tuple[float, float]:
    return round(float(np.mean(values)), 3), round(float(np.std(values, ddof=1) / len(values) ** 0.5), 3)


def main() -> None:
    """Run all arms, write filtering.json beside this file and print the table."""
    found = []
    for rate, level in LEVELS.items():
        curves = {arm: [curve(arm, rate, seed) for seed in SEEDS] for arm in ARMS}
        found += [{"rate": rate, "level": level, "arm": arm, **summary(curves[arm], curves["neither"], level)} for arm in ARMS]
    RESULT.write_text("[\n" + ",\n".join(json.dumps(row) for row in found) + "\n]\n", encoding="utf-8")
    print("| learning rate | | generated / trained | held-out success | gained | steps | answers generated |")
    print("|---|---|---|---|---|---|---|")
    for r in found:
        pairs = (r[name] for name in ("success_gained", "steps_to_level", "answers_to_level"))
        cells = " | ".join(f"{value:.2f} ± {error:.2f}" for value, error in pairs)
        print(f"| {r['rate']} | {r['arm']} | {r['generated_per_trained']:.2f} | {r['success_after']:.3f} | {cells} |")
