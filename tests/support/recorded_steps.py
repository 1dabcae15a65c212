"""A step that was trained and kept for ``replay``, without Ray: the driver's functions and a rank."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayloop.actors.assignments import assignments
from rayloop.cluster.loop.recording import keep_step
from rayloop.config.settings import dump
from rayloop.core.groups import Group, Member, Outcome, Scored, Unscored, UnscoredKind
from rayloop.core.protocols import ScoreContext, TrainItem
from rayloop.core.types import Message, Sampling, Task, Trajectory, TrajectoryId, Version
from rayloop.engines.settings import FsdpSettings
from rayloop.engines.training.fsdp import FsdpEngine
from rayloop.envs.episode import summarize
from rayloop.grpo.advantage import build_advantage, over_step, with_advantages
from rayloop.grpo.filters import build_filters
from rayloop.grpo.selection import apply_filters, select
from rayloop.rewards.verdicts import VERDICTS
from rayloop.run.config import RunConfig
from rayloop.run.folder import RunFolder
from rayloop.run.records.rollouts import RolloutRecord, rollout_record
from rayloop.run.records.step_metrics import Collected
from tests.engines.training import engine, trajectory
from tests.support.runs import settings

VERSION = Version(1, 6)
"""The weights that the step trains: it is step 7."""
Shape = Sequence[tuple[int, tuple[int, int] | None, int]]
SHAPES: tuple[Shape, ...] = (
    [(12, (2, 3), 5)],
    [(3, (2, 2), 4), (2, (3, 1), 5), (6, None, 2)],
    [(9, None, 6), (4, None, 3)],
)
"""Context tokens, an image's columns and rows, sampled tokens: one turn, and several."""
RESULTS = ((1.0, 0.0, 0.5), (0.25, 0.75, 0.25), (1.0, 1.0, 1.0), (0.0, None, 0.875))
"""The environment's results by group; None: it failed."""
ENVIRONMENT_RESULT = {"use": "rayloop.rewards.environment_result:EnvironmentResult"}


def made_config(folder: Path, model: Path, **changes: Any) -> RunConfig:
    """A run of four groups of three on one rank."""
    values = {"reward__source": ENVIRONMENT_RESULT, "algorithm__group_size": 3} | changes
    values["algorithm__groups_per_step"] = changes.get("algorithm__groups_per_step", 4)
    return RunConfig.model_validate(settings(folder, model, keep_rollouts="all", **values))


def played(model: Path, group: int, sample: int, result: float | None) -> Trajectory:
    """An episode; the third member of a group begins a second context."""
    made = trajectory(model, 10 * group + sample, SHAPES[sample], Sampling(temperature=0.9))
    turns = made.turns
    if sample == 2:
        again = dataclasses.replace(turns[0], restart=True, images=())
        turns = (*turns[:2], again, *turns[2:])
    return dataclasses.replace(
        made,
        id=TrajectoryId(group, sample),
        task_id=f"task-{group}",
        turns=turns,
        env_result=result,
    )


def groups(model: Path, outcomes: Mapping[TrajectoryId, Outcome] = {}) -> list[Group]:
    """All groups as they are after scoring; ``outcomes``: others than the environment's results."""
    made = []
    for number, results in enumerate(RESULTS, 1):
        extra = {"file": __file__, "at": number}
        asked = (Message("user", ("What is it?",)),)
        task = Task(f"task-{number}", asked, ground_truth=number, source="test", extra=extra)
        members = []
        for sample, result in enumerate(results):
            episode = played(model, number, sample, result)
            outcome: Outcome = Unscored(UnscoredKind.ENVIRONMENT_FAILURE, "its page is not there")
            if result is not None:
                outcome = Scored(result)
            outcome = outcomes.get(episode.id, outcome)
            payload: Any = episode if result is not None else None
            members.append(Member(summarize(episode, task, 1.0, None), outcome, payload))
        made.append(Group(number, task, tuple(members), step=VERSION.step))
    return made


def texts(group: Group) -> list[RolloutRecord]:
    """The records of a group's episodes, with a character for each token."""

    def text(tokens: Sequence[int]) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)

    records = []
    for member in group.members:
        payload: Any = member.payload
        if payload is not None:
            records.append(rollout_record(group, member, payload, text, text))
    return records


def train(config: RunConfig, chosen: Sequence[Group], trainer: FsdpEngine) -> None:
    """Train these groups on one rank."""
    [plan] = assignments(
        chosen,
        1,
        config.policy.update,
        config.seed,
        VERSION,
        config.algorithm.target,
        treat_as_on_policy=False,
    )
    updates = []
    for share in plan:
        items = []
        for assignment in share:
            credit = assignment.credit
            payload: Any = assignment.payload
            ref_logprobs = None
            if config.policy.loss.uses_kl:
                segments = [segment.flatten() for segment in payload.segments]
                ref_logprobs = [
                    logprob - 0.1
                    for flat in segments
                    for logprob in flat.rollout_logprobs[flat.loss_mask]
                ]
            items.append(
                TrainItem(
                    payload,
                    credit.advantage,
                    ref_logprobs,
                    lag=assignment.lag,
                    turns=credit.turns,
                    streams=credit.streams,
                    group_tokens=assignment.group_tokens,
                )
            )
        updates.append(items)
    trainer.train(updates)


def kept_step(
    folder: Path, model: Path, outcomes: Mapping[TrajectoryId, Outcome] = {}, **changes: Any
) -> RunFolder:
    """The folder of a run that has step 7 on record; ``changes``: of its configuration."""
    config = made_config(folder, model, **changes)
    advantage = build_advantage(config.algorithm.advantage)
    filters = build_filters(config.algorithm.filtering.filters)
    ended = [
        apply_filters(with_advantages(group, advantage), filters)
        for group in groups(model, outcomes)
    ]
    selection = select(ended, config.algorithm.target, config.algorithm.filtering)
    chosen = over_step(selection.train, advantage)
    small = FsdpSettings(micro_batch_tokens=40, threads=1)
    with engine(model, small, loss=config.policy.loss) as trainer:
        trainer.recorder.on = True
        train(config, chosen, trainer)
        ranks = [trainer.recorder.result()]
    records = [record for group in ended for record in texts(group)]
    run = RunFolder(folder, config.name)
    run.rollouts.path.mkdir(parents=True)
    run.write_config(dump(config))
    later: dict[int, Any] = {}
    collected = Collected(
        tuple(_referenced(group, later) for group in chosen),
        tuple(_referenced(group, later) for group in ended),
    )
    reporter: Any = SimpleNamespace(config=config, tokens=ranks, replayable=run.rollouts.write_step)
    version = Version(VERSION.lineage, VERSION.step + 1)
    asyncio.run(keep_step(reporter, version, collected, records, pytest.fail))
    return run


class Later:
    """A reference to a value in the object store."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __await__(self) -> Iterator[Any]:
        return self.value
        yield


def _referenced(group: Group, later: dict[int, Any]) -> Group:
    """The group with references to its payloads, one for each in ``later``."""
    members = []
    for member in group.members:
        payload: Any = member.payload
        if payload is not None:
            payload = later.setdefault(id(payload), Later(payload))
        members.append(dataclasses.replace(member, payload=payload))
    return dataclasses.replace(group, members=tuple(members))


# Rewards -----------------------------------------------------------------------------------------


def raises_on_sevens(trajectory: Trajectory) -> float:
    """The environment's result; it raises on sample 1 of group 2."""
    if trajectory.id == TrajectoryId(2, 1):
        raise ValueError("seven")
    assert trajectory.env_result is not None
    return trajectory.env_result


def explodes(trajectory: Trajectory) -> float:
    """Nobody may call it."""
    raise AssertionError("code outside of rayloop was run")


class JudgedTwice:
    """Twice the verdict of a judge, from the verdicts on record alone."""

    async def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        verdicts = VERDICTS.get()
        assert verdicts is not None
        saved = verdicts.saved(f"{trajectory.id.group}{trajectory.id.sample}")
        if saved is None:
            return Unscored(UnscoredKind.REWARD_UNAVAILABLE, "its verdict is not on record")
        return Scored(2 * saved.value)
