"""``reward.per: group``: when a run asks for the outcomes of a group, an evaluation for those of
its answers, and ``try``.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from rayloop.cli import main
from rayloop.cluster.stages.evaluate import _missing
from rayloop.cluster.supervision.attempts import EVALUATION_EPISODES_AT_ONCE, evaluate_answers
from rayloop.core.groups import Group, Member, Scored, Unscored, UnscoredKind
from rayloop.core.types import (
    EndReason,
    RolloutRequest,
    Sampling,
    Summary,
    Task,
    TrajectoryId,
    Version,
)
from rayloop.measure.controls import RIGHT, SAMPLED, Item
from rayloop.run.config import RunConfig
from rayloop.run.held_out import AnswerRequest, read_items
from rayloop.run.records.rollouts import RolloutRecord, RolloutTurn
from tests.support.runs import ROOT, finished, settings
from tests.support.stand_ins import Behave, Handle, Make, World, failed

GROUP = {"reward__per": "group"}
UNAVAILABLE = Unscored(UnscoredKind.REWARD_UNAVAILABLE, "the disk is full")


def plays_well(made: World) -> Behave:
    async def behave(actor: Handle, request: RolloutRequest) -> Any:
        await asyncio.sleep(0.001 * request.id.sample)
        return made.well(request)

    return behave


def asked(
    made: World, answer: Callable[[Handle, Sequence[Any]], Awaitable[Any]]
) -> list[tuple[int, int]]:
    """The slot and the number of payloads of each call of ``score_group``; ``answer`` is what it
    returns.
    """
    calls: list[tuple[int, int]] = []

    async def score_group(actor: Handle, payloads: Sequence[Any]) -> Any:
        calls.append((actor.slot, len(payloads)))
        return await answer(actor, payloads)

    made.score_group = score_group  # type: ignore[method-assign]
    return calls


async def ranks(actor: Handle, payloads: Sequence[Any]) -> Any:
    return [Scored(float(i)) for i in range(len(payloads))]


def test_a_group_is_scored_once_when_its_last_episode_has_ended(world: Make) -> None:
    made = world(plays_well, **GROUP)
    calls = asked(made, ranks)
    made.run(2)
    assert {count for _, count in calls} == {8}
    assert len(calls) == 4, "two groups a step"
    assert made.ledger.counts()["trained"] == 32


def test_episodes_that_could_not_be_played_have_no_part_in_it(world: Make) -> None:
    def some_fail(made: World) -> Behave:
        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            await asyncio.sleep(0)
            return (
                failed(request, "no", bug=True)
                if request.id.sample in (2, 5)
                else made.well(request)
            )

        return behave

    made = world(some_fail, **GROUP)
    calls = asked(made, ranks)
    made.run(1)
    assert {count for _, count in calls} == {6}
    assert made.ledger.counts()["excluded[environment_failure]"] == 2 * len(calls)
    trained = [m for g in made.rollouts.ready.groups for m in g.members]
    assert not trained


def test_a_group_without_a_played_episode_is_not_asked_about(world: Make) -> None:
    def first_group_fails(made: World) -> Behave:
        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            await asyncio.sleep(0)
            return (
                failed(request, "no", bug=True)
                if request.task.id == "train-0"
                else made.well(request)
            )

        return behave

    made = world(first_group_fails, **GROUP)
    calls = asked(made, ranks)
    made.run(1)
    assert 0 not in {count for _, count in calls}


def test_another_slot_is_asked_when_something_around_the_grader_fails(world: Make) -> None:
    made = world(plays_well, reward__actors=2, **GROUP)

    async def ill(actor: Handle, payloads: Sequence[Any]) -> Any:
        return (
            [UNAVAILABLE, *await ranks(actor, payloads[1:])]
            if actor.slot == 0
            else await ranks(actor, payloads)
        )

    calls = asked(made, ill)
    made.run(1)
    assert {slot for slot, _ in calls} == {0, 1}
    assert made.ledger.counts()["trained"] == 16, "the other slot's word counts"


# Evaluations --------------------------------------------------------------------------------------

TASKS = [Task(name, ()) for name in "abc"]


class Player:
    """Plays nothing, and records what was scored together."""

    def __init__(self) -> None:
        self.together: list[list[str]] = []
        self.evaluation: Any = None
        self.history = SimpleNamespace(forget=lambda group: None)
        self.emit_bad_data, self.rewards = None, self

    def _member(self, request: RolloutRequest, of: int) -> Member:
        nothing = Version(0, 0)
        summary = Summary(
            request.id,
            0,
            request.task.id,
            "",
            EndReason.DONE,
            9,
            3,
            1,
            0,
            0,
            True,
            nothing,
            nothing,
        )
        return Member(summary, Scored(float(of)))

    async def rollout_group(
        self, asked: Sequence[RolloutRequest], step: int, bad_data: Any = None
    ) -> list[Member]:
        self.together.append([request.task.id for request in asked])
        return [self._member(request, len(asked)) for request in asked]

    async def describe(self, group: Group) -> tuple[list[Any], dict[str, bytes]]:
        return [], {}


def evaluated(folder: Path, per: str) -> tuple[Player, list[Item], list[TrajectoryId]]:
    config = RunConfig.model_validate(settings(folder, folder, reward__per=per))
    asked = [AnswerRequest(RIGHT, task, Sampling()) for task in TASKS]
    asked += [
        AnswerRequest(SAMPLED, task, Sampling(), sample) for sample in range(2) for task in TASKS
    ]
    player, heard, kept = Player(), list[TrajectoryId](), list[Item]()

    def keep(item: Item, images: dict[str, bytes]) -> None:
        kept.append(item)

    runner: Any = player
    runner.config = config
    items = asyncio.run(
        evaluate_answers(asked, runner, 0, keep, lambda member: heard.append(member.summary.id))
    )
    assert [(i.arm, i.task, i.sample) for i in items] == [
        (p.arm, p.task.id, p.sample) for p in asked
    ]
    assert Counter(item.key for item in kept) == Counter(item.key for item in items)
    assert player.evaluation is None
    return player, items, heard


@pytest.mark.parametrize("per", ["trajectory", "group"])
def test_the_answers_of_an_arm_to_a_task_are_a_group_and_each_is_heard(
    tmp_path: Path, per: str
) -> None:
    player, items, heard = evaluated(tmp_path, per)
    assert Counter(map(tuple, player.together)) == Counter(
        [("a",), ("b",), ("c",), ("a", "a"), ("b", "b"), ("c", "c")]
    )
    assert [item.reward for item in items] == [1.0] * 3 + [2.0] * 6
    assert len(set(heard)) == len(items) == 9, (
        "every score is reported, else nobody sees a grader that raises on all"
    )


class Describing(Player):
    """Keeps what it was asked to describe, and how many episodes played at once.

    Every second sample has no payload, as one that failed, and so no record.
    """

    def __init__(self) -> None:
        super().__init__()
        self.described: list[list[TrajectoryId]] = []
        self.playing = self.most = 0

    async def rollout_group(
        self, asked: Sequence[RolloutRequest], step: int, bad_data: Any = None
    ) -> list[Member]:
        self.playing += len(asked)
        self.most = max(self.most, self.playing)
        await asyncio.sleep(0.01)
        self.playing -= len(asked)
        return await super().rollout_group(asked, step, bad_data)

    async def describe(self, group: Group) -> tuple[list[Any], dict[str, bytes]]:
        ids = [member.summary.id for member in group.members]
        self.described.append(ids)
        return [self._record(group, id.sample) for id in ids if id.sample % 2 == 0], {
            group.task.id: b"image"
        }

    def _record(self, group: Group, sample: int) -> RolloutRecord:
        turn = RolloutTurn("assistant", f"answer {sample} to {group.task.id}", True)
        return RolloutRecord(
            group.number, sample, 0, group.task.id, "", "", (), (turn,), "done", 1.0
        )


def test_records_are_made_by_group_and_each_item_has_its_own(tmp_path: Path) -> None:
    config = RunConfig.model_validate(settings(tmp_path, tmp_path))
    tasks = [Task(f"t{number}", ()) for number in range(60)]
    asked = [AnswerRequest(RIGHT, task, Sampling()) for task in tasks]
    asked += [
        AnswerRequest(SAMPLED, task, Sampling(), sample) for sample in range(4) for task in tasks
    ]
    player, kept = Describing(), dict[tuple[str, str, int], dict[str, bytes]]()

    def keep(item: Item, images: dict[str, bytes]) -> None:
        kept[item.key] = images

    runner: Any = player
    runner.config = config
    items = asyncio.run(evaluate_answers(asked, runner, 0, keep, lambda member: None))
    assert Counter(map(len, player.described)) == {1: 60, 4: 60}
    assert all(len({id.group for id in ids}) == 1 for ids in player.described)
    assert {item.key: item.text for item in items} == {
        (one.arm, one.task.id, one.sample): (
            f"answer {one.sample} to {one.task.id}" if one.sample % 2 == 0 else ""
        )
        for one in asked
    }
    assert kept == {item.key: {item.task: b"image"} for item in items}
    assert EVALUATION_EPISODES_AT_ONCE - 4 < player.most < EVALUATION_EPISODES_AT_ONCE + 4, (
        "as many as may, whatever the largest group"
    )


def test_what_is_scored_together_is_played_again_together(tmp_path: Path) -> None:
    asked = [
        AnswerRequest(SAMPLED, task, Sampling(), sample) for sample in range(2) for task in TASKS
    ]
    done = {(SAMPLED, "a", 0), (SAMPLED, "a", 1), (SAMPLED, "b", 1)}
    missing = {}
    for per in ("trajectory", "group"):
        config = RunConfig.model_validate(settings(tmp_path, tmp_path, reward__per=per))
        missing[per] = [(p.task.id, p.sample) for p in _missing(config.reward, asked, done)]
    assert missing["trajectory"] == [("b", 0), ("c", 0), ("c", 1)]
    assert missing["group"] == [("b", 0), ("c", 0), ("b", 1), ("c", 1)]


# A real run ---------------------------------------------------------------------------------------


@pytest.mark.slow_faults
@pytest.mark.timeout(600)
def test_a_run_an_evaluation_and_a_try_of_a_ranking(
    tmp_path: Path, digits_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    source = {"use": "tests.support.rewards:TokenRanking", "with": {"marks": str(marks)}}
    config = settings(tmp_path, digits_model, steps=1, reward__source=source, **GROUP)
    (tmp_path / "eval.jsonl").write_text(
        "".join((tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines(True)[:3]),
        encoding="utf-8",
    )
    config |= {"evaluation": {"every": 1}}
    config["data"]["eval"] = str(tmp_path / "eval.jsonl")
    config["algorithm"]["filtering"] = {"filters": [{"use": "tests.support.filters:first"}]}

    def sizes() -> Counter[str]:
        found = Counter(path.name.rpartition("-")[2] for path in marks.glob("group-*"))
        for path in marks.iterdir():
            path.unlink()
        return found

    made = finished(config)
    assert made.metrics[-1]["val/scored"] == 3
    assert {"reward/component/share/mean", "reward/mean"} <= made.metrics[-1].keys()
    assert made.metrics[-1]["filtered/first"] == made.metrics[-1]["rollout/groups"] >= 3, (
        "three of four are left"
    )
    trained = sizes()
    assert set(trained) == {"4"}, "held-out answers are alone, and are scored by themselves"
    assert trained["4"] >= 2

    file = tmp_path / "again.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    out = tmp_path / "eval"
    done = subprocess.run(
        [sys.executable, "-m", "rayloop", "eval", str(file), "--out", str(out), "--samples", "2"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert Counter(item.arm for item in read_items(out / "items.jsonl")) == {RIGHT: 3, SAMPLED: 6}
    assert sizes() == {"2": 3}
    assert json.loads((out / "summary.json").read_text(encoding="utf-8"))["unscored"] == 0

    assert main(["try", str(file)]) == 0
    assert "2 of 2 answers have a reward" in capsys.readouterr().out
    assert sizes() == {"2": 1}
