"""What bounded staleness costs and which episodes it trains: the real RolloutManager on a virtual
clock.

    python -m benchmarks.evidence staleness   writes staleness.json beside it and
    docs/staleness.png, prints the table

Steps of 16 x 8 on 128 engine slots; the trainer takes 0.3 of an episode's mean time. Episodes are
log-normal (sigma 0.8, cut at six times the mean, as in benchmarks/latencies.json). ``shared`` is
the part of the logarithm's variance that belongs to the task: at 0.7 the samples of a long task are
long together. Half of all answers are right; filters and ranking are the defaults.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.virtual_time import VirtualLoop
from rayloop.core.deadlines import background
from rayloop.core.events import Event
from rayloop.core.failures import DataFailure
from rayloop.core.groups import Group, Member, Scored
from rayloop.core.ledger import Ledger
from rayloop.core.types import EndReason, RolloutRequest, Summary, Version, derive
from rayloop.grpo.advantage import build_advantage, with_advantages
from rayloop.grpo.filters import build_filters
from rayloop.grpo.selection import apply_filters
from rayloop.rollout.failed_episodes import FailureHistory
from rayloop.rollout.manager import RolloutManager
from rayloop.run.config import RunConfig
from rayloop.run.order import training_rows

RESULT, PICTURE = (
    Path(__file__).with_suffix(".json"),
    Path(__file__).parents[2] / "docs" / "staleness.png",
)
TASKS, GROUP, GROUPS, SLOTS = 512, 8, 16, 128
SIGMA, CUT, LONG = 0.8, 6.0, 2.0
"""Spread of the logarithm; the longest and what counts as a long episode, in means."""
TRAINING_MEANS = 0.3
"""Means that a step of the trainer and its weight update take."""
WARM_UP_STEPS = 10
"""Steps that are left out at the beginning."""
BOUNDS, SHARED = (1, 2, 4, 8), (0.0, 0.7)


class World:
    """A run's driver, player and engines in one: an episode waits for a slot, then lasts as long as
    it was drawn.
    """

    def __init__(
        self,
        folder: Path,
        shared: float = 0.0,
        uniform: float = 0.0,
        *,
        seed: int = 0,
        **algorithm: Any,
    ) -> None:
        rows = ({"id": f"{n}", "prompt": f"{n}"} for n in range(TASKS))
        (folder / "rows.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
        self.config = RunConfig.model_validate(
            {
                "name": "simulated",
                "output": str(folder),
                "steps": 1,
                "seed": seed,
                "model": {"path": "simulated"},
                "data": {"train": str(folder / "rows.jsonl")},
                "reward": {"source": {"use": "benchmarks.step:DigitShare"}},
                "algorithm": {"group_size": GROUP, "groups_per_step": GROUPS, **algorithm},
            }
        )
        self.shared, self.uniform = shared, uniform
        self.ledger, self.version = Ledger(), Version(1, 0)
        self.rollouts = RolloutManager(
            self.config,
            self.ledger,
            training_rows(self.config, self),
            self,
            FailureHistory(self.config.environment),
        )
        self.filters = build_filters(self.config.algorithm.filtering.filters)
        self.rollouts.synced(self.version)
        self.slots = asyncio.Semaphore(SLOTS)
        self.lengths: dict[int, list[float]] = {}
        """Of each group's episodes, in means."""

    def event(self, event: Event) -> None:
        """Ignore an event of the run."""

    def bad_row(self, failure: DataFailure) -> None:
        """Raise the failure: all rows are good."""
        raise failure

    async def rollout_group(
        self, asked: Sequence[RolloutRequest], step: int, begins: Callable[[RolloutRequest], None]
    ) -> list[Member]:
        """Play the requests, each in a slot."""
        return await asyncio.gather(
            *(self._episode(request, partial(begins, request)) for request in asked)
        )

    async def _episode(self, request: RolloutRequest, begins: Callable[[], None]) -> Member:
        drawn = random.Random(derive(request.id.group, request.id.sample))
        of_task = random.Random(request.id.group).gauss(0, 1)
        z = math.sqrt(self.shared) * of_task + math.sqrt(1 - self.shared) * drawn.gauss(0, 1)
        length = min(CUT, math.exp(SIGMA * z - SIGMA**2 / 2))
        self.lengths.setdefault(request.id.group, []).append(length)
        async with self.slots:
            begins()
            first = self.version
            await asyncio.sleep(length)
        summary = Summary(
            request.id,
            0,
            request.task.id,
            "",
            EndReason.DONE,
            length=200,
            sampled_tokens=100,
            turns=1,
            images=0,
            observation_images=0,
            images_consistent=True,
            first_version=first,
            last_version=self.version,
        )
        return Member(summary, self.outcome(request))

    def outcome(self, request: RolloutRequest) -> Scored:
        """The reward, and the policy's faults."""
        return Scored(self.reward(request))

    def reward(self, request: RolloutRequest) -> float:
        """What an answer earns.

        All of a group fail in a share ``uniform`` of the groups, which the filter removes.
        """
        if random.Random(derive("uniform", request.id.group)).random() < self.uniform:
            return 0.0
        return float(
            random.Random(derive("reward", request.id.group, request.id.sample)).random() < 0.5
        )

    async def finish(self, group: Group) -> Group:
        """Replay, advantages and filters, as the driver applies them."""
        group = self.rollouts.finished.replay(group)
        group = with_advantages(group, build_advantage(self.config.algorithm.advantage))
        return apply_filters(group, self.filters)

    async def run(self, steps: int) -> dict[str, Any]:
        """What the steps after the first ``WARM_UP_STEPS`` took, trained and lost."""
        taken: list[tuple[int, list[int]]] = []
        lags: list[int] = []
        clock = asyncio.get_running_loop().time
        began = 0.0
        async with background(self.rollouts.run(self, self.finish)):
            for step in range(steps):
                began = clock() if step == WARM_UP_STEPS else began
                groups = (await self.rollouts.collect(self.version, {})).groups
                await asyncio.sleep(TRAINING_MEANS)
                self.rollouts.ready.settle_trained(groups)
                self.ledger.check()
                taken += [
                    (group.number, [m.summary.id.sample for m in group.kept]) for group in groups
                ]
                if step >= WARM_UP_STEPS:
                    lags += [
                        self.version.step - m.summary.first_version.step
                        for g in groups
                        for m in g.kept
                    ]
                self.version = Version(1, step + 1)
                self.rollouts.synced(self.version)
            ended = clock()
        return {
            "steps_per_mean": round((steps - WARM_UP_STEPS) / (ended - began), 3),
            "lag": round(mean(lags), 2),
            **self._statuses(dict(taken)),
        }

    def _statuses(self, trained: dict[int, list[int]]) -> dict[str, float]:
        """Whom the steps trained, over the groups issued after the warm steps' worth and before the
        first that is not final.
        """
        live = [*self.rollouts.in_flight, *(group.number for group in self.rollouts.ready.groups)]
        window = range(
            WARM_UP_STEPS * GROUPS, min(live, default=self.rollouts.scheduler.next_number + 1)
        )
        issued = [length for number in window for length in self.lengths[number]]
        taken = [
            self.lengths[number][sample] for number in window for sample in trained.get(number, ())
        ]
        counts = self.ledger.counts()
        lost = {
            state: sum(n for name, n in counts.items() if name.startswith(state)) / counts["issued"]
            for state in ("stale", "surplus")
        }
        return {
            "length_ratio": round(mean(taken) / mean(issued), 3),
            "long_ratio": round(_long(taken) / _long(issued), 3),
            **{state: round(share, 4) for state, share in lost.items()},
        }


def _long(lengths: list[float]) -> float:
    return sum(length > LONG for length in lengths) / len(lengths)


def simulate(
    max_staleness: int,
    when_late: str,
    shared: float,
    steps: int = 210,
    uniform: float = 0.0,
    **filtering: Any,
) -> dict[str, Any]:
    """One run of ``steps`` steps, with other keys of ``filtering``.

    Raises RuntimeError when it comes to a standstill.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        asyncio.Runner(loop_factory=VirtualLoop) as runner,
    ):
        staleness = {"max_staleness": max_staleness, "when_late": when_late}
        world = World(
            Path(folder),
            shared,
            uniform,
            staleness=staleness,
            filtering={"max_generation_batches": 8, **filtering},
        )
        found = runner.run(world.run(steps))
        world.rollouts.close()
    return {
        "max_staleness": max_staleness,
        "when_late": when_late,
        "shared": shared,
        "uniform": uniform,
        **filtering,
        **found,
    }


def main() -> None:
    """Run all settings, write staleness.json beside this file and docs/staleness.png, and print the
    tables.
    """
    runs = [simulate(0, "wait", shared) for shared in SHARED]
    runs += [
        simulate(bound, late, shared)
        for shared in SHARED
        for bound in BOUNDS
        for late in ("wait", "drop")
    ]
    filtered = [simulate(bound, "wait", 0.7, uniform=0.5) for bound in BOUNDS]
    RESULT.write_text(
        "[\n" + ",\n".join(json.dumps(run) for run in runs + filtered) + "\n]\n", encoding="utf-8"
    )
    print("\n".join([*markdown(runs), "", "half of the groups filtered", *markdown(filtered)]))
    draw(runs)


def markdown(runs: list[dict[str, Any]]) -> list[str]:
    """The table of docs/algorithm.md."""
    lines = [
        (
            "| `max_staleness` | `when_late` | shared | steps per time | mean lag | mean length |"
            " long episodes | stale | surplus |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in runs:
        late = r["when_late"] if r["max_staleness"] else ""
        lines.append(
            f"| {r['max_staleness']} | {late} | {r['shared']} | {r['steps_per_mean']:.2f} |"
            f" {r['lag']:.1f} | {r['length_ratio']:.2f} | {r['long_ratio']:.2f} | {r['stale']:.1%}"
            f" | {r['surplus']:.1%} |"
        )
    return lines


def draw(runs: list[dict[str, Any]]) -> None:
    """Steps per time against whom they train."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for shared, color in zip(SHARED, ("tab:blue", "tab:red"), strict=True):
        for late, style in (("wait", "o-"), ("drop", "x--")):
            points = [
                r
                for r in runs
                if r["shared"] == shared and r["when_late"] == late and r["max_staleness"]
            ]
            pace, long = [r["steps_per_mean"] for r in points], [r["long_ratio"] for r in points]
            axes.plot(
                pace,
                long,
                style,
                color=color,
                label=f"{late}, {shared:.0%} of the variance by task",
            )
            for r, x, y in zip(points, pace, long, strict=True):
                axes.annotate(
                    str(r["max_staleness"]),
                    (x, y),
                    xytext=(4, -11),
                    textcoords="offset points",
                    fontsize=8,
                )
    axes.set(
        xlabel="steps per mean time of an episode (numbers: max_staleness)",
        ylabel="long episodes, trained / played",
        ylim=(0, 1.1),
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower center", ncols=2)
    figure.savefig(PICTURE, dpi=100, metadata={"Software": None})
