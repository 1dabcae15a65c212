"""A run in one process, without Ray: the product's engine, episodes, reward, trainer and
RolloutManager, on one thread.

Its seconds are the process's CPU seconds, which other programs on the machine hardly change.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.evidence.costs import Curve, Steps, noted
from rayloop.actors.reward import RewardActor
from rayloop.actors.rollout import RolloutActor
from rayloop.chat.rendering import Renderer
from rayloop.core.deadlines import background
from rayloop.core.events import Event
from rayloop.core.failures import DataFailure
from rayloop.core.groups import Group, Member
from rayloop.core.ledger import Ledger
from rayloop.core.protocols import TrainItem
from rayloop.core.types import (
    RolloutRequest,
    Sampling,
    Task,
    Trajectory,
    TrajectoryId,
    Version,
    derive,
)
from rayloop.data.dataset import Dataset
from rayloop.engines.training.fsdp import FsdpEngine
from rayloop.envs.episode import FirstPrompts, run_episode, summarize
from rayloop.envs.instance import Environments
from rayloop.grpo.advantage import build_advantage, with_advantages
from rayloop.grpo.filters import build_filters
from rayloop.grpo.selection import apply_filters
from rayloop.rollout.failed_episodes import FailureHistory
from rayloop.rollout.manager import RolloutManager
from rayloop.run.config import RunConfig
from rayloop.run.order import training_rows
from rayloop.transports.plain import ArraySender
from rayloop.transports.settings import ObjectStoreTransport

HELD_OUT = 1_000_000
"""Group numbers of held-out answers begin here."""


class OneProcess:
    """Driver, player and trainer of a run with one update per step.

    ``steps``: what each step's groups and update were.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.ledger, self.version = config, Ledger(), Version(1, 0)
        self.rollouts = RolloutManager(
            config,
            self.ledger,
            training_rows(config, self),
            self,
            FailureHistory(config.environment),
        )
        self.rollouts.synced(self.version)
        self.renderer, self.filters = (
            Renderer(config.model),
            build_filters(config.algorithm.filtering.filters),
        )
        self.advantage = build_advantage(config.algorithm.advantage)
        self.environments = Environments(
            config.environment.episode.environment, config.environment.kinds
        )
        self.sampler = RolloutActor(
            config.model, config.engine, ObjectStoreTransport(), str(folder)
        )
        self.reward = RewardActor(config.model, config.reward)
        self.trainer = FsdpEngine(
            config.model,
            config.policy.engine,
            config.policy.optimizer,
            config.policy.loss,
            rank=0,
            world_size=1,
            init_method=f"file://{folder}/ranks",
            seed=config.seed,
        )
        assert config.data.eval
        rows = Dataset(
            config.data.eval,
            config.data.reader.build(),
            True,
            self.bad_row,
            config.environment.kinds,
        )
        self.held_out = list(rows)[: config.evaluation.limit]
        self.steps = Steps()

    def event(self, event: Event) -> None:
        """Ignore an event of the run."""

    def bad_row(self, failure: DataFailure) -> None:
        """Raise the failure: all rows are good."""
        raise failure

    async def rollout_group(
        self, asked: Sequence[RolloutRequest], step: int, begins: Callable[[RolloutRequest], None]
    ) -> list[Member]:
        """Play the requests, which are of one task, and score them."""

        async def episode(request: RolloutRequest) -> Trajectory:
            begins(request)
            environment, settings = (
                self.environments.of(request.task),
                self.config.environment.episode,
            )
            return await run_episode(
                request, environment, self.renderer, settings, self.sampler.engine.generate, prompts
            )

        prompts = FirstPrompts(self.renderer)
        task = asked[0].task
        played: list[Any] = await asyncio.gather(
            *map(episode, asked)
        )  # in place of references to the object store
        outcomes = await self.reward.score(task, step, *played)
        summaries = [
            summarize(trajectory, task, 0.0, self.renderer.image_token) for trajectory in played
        ]
        return [Member(*member) for member in zip(summaries, outcomes, played, strict=True)]

    async def finish(self, group: Group) -> Group:
        """Replay, advantages and filters, as the driver applies them."""
        group = self.rollouts.finished.replay(group)
        return apply_filters(with_advantages(group, self.advantage), self.filters)

    async def score(self, samples: int) -> float:
        """Mean reward of so many sampled answers to each held-out task; equal weights give equal
        answers.
        """
        sampling = self.config.rollout.sampling.sampling()
        groups = [
            self._held_out(number, task, sampling, samples)
            for number, task in enumerate(self.held_out)
        ]
        members = [member for group in await asyncio.gather(*groups) for member in group]
        return fmean(member.reward for member in members)

    async def _held_out(
        self, number: int, task: Task, sampling: Sampling, samples: int
    ) -> list[Member]:
        ids = [TrajectoryId(HELD_OUT + number, sample) for sample in range(samples)]
        asked = [
            RolloutRequest(
                task, id, 0, derive(self.config.seed, "held out", task.id, id.sample), sampling
            )
            for id in ids
        ]
        return await self.rollout_group(asked, 0, lambda request: None)

    async def sync(self) -> None:
        """Give the engine the trainer's weights, as ``version``."""
        update = ArraySender().serialize(self.version, self.trainer.export(self.version))
        await self.sampler.load(update.manifest, update.source)
        self.rollouts.synced(self.version)

    async def learn(self, compared: int, start: dict[str, float]) -> Curve:
        """The score before the first step and after each ``evaluation.every``.

        ``start``: the first one by model and seed, which all arms share.
        """
        every, samples = self.config.evaluation.every, self.config.evaluation.samples
        await self.sync()
        if (same := f"{self.config.model.path} {self.config.seed}") not in start:
            start[same] = await self.score(samples)
        scores = [start[same]]
        async with background(self.rollouts.run(self, self.finish)):
            for step in range(1, self.config.steps + 1):
                began = time.process_time()
                collected = await self.rollouts.collect(self.version, {})
                members = [member for group in collected.groups for member in group.kept]
                metrics = await asyncio.to_thread(
                    self.trainer.train, [[_item(member) for member in members]]
                )
                self.rollouts.ready.settle_trained(collected.groups)
                self.version = Version(1, step)
                await self.sync()
                seconds = time.process_time() - began
                noted(
                    self.steps,
                    collected.ended_groups,
                    members,
                    metrics.get("actor/grad_norm", 0.0),
                    seconds,
                )
                if step % every == 0:
                    scores.append(await self.score(samples))
        self.rollouts.close()
        self.trainer.close()
        return Curve.of(self.steps, scores, every, compared)


def _item(member: Member) -> TrainItem:
    assert isinstance(member.payload, Trajectory)
    assert member.advantage is not None
    return TrainItem(member.payload, member.advantage)
