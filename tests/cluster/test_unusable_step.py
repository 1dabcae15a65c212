"""A step that gets no trajectories: what was played is kept, and the error quotes an answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from statistics import stdev
from types import SimpleNamespace
from typing import Any

import pytest

from rayloop.cluster.driver import Driver
from rayloop.core.events import Event
from rayloop.core.failures import Diverged, GenerationBudgetSpent, GraderBroken
from rayloop.grpo.advantage import with_advantages
from rayloop.grpo.alarms import Alarms, AlarmSettings
from rayloop.grpo.collapse import ENTROPY, MEAN_STEPS
from rayloop.run.config import RunConfig
from rayloop.run.records.rollouts import RolloutRecord, RolloutTurn
from rayloop.run.records.step_metrics import Collected
from tests.support.drivers import made_driver
from tests.support.runs import settings
from tests.unit.groups import make_group


def record(group: int, **fields: Any) -> RolloutRecord:
    said = (
        ("assistant", "7 or 8, " * 100, True),
        ("user", "go on", False),
        ("assistant", "9", True),
    )
    turns = tuple(RolloutTurn(*turn) for turn in said)
    values = {"reward": 0.0, "flags": ("unparsable",), "truth": [1, 2], **fields}
    return RolloutRecord(group, 0, 0, f"task-{group}", "", "prompt", (), turns, "done", **values)


class EpisodeRunner:
    """Describes groups, which are numbers here."""

    def __init__(self, **fields: Any) -> None:
        self.fields, self.rewards = fields, self

    async def describe(self, group: int) -> tuple[list[RolloutRecord], dict[str, bytes]]:
        return [record(group, **self.fields)], {}


class RolloutManager:
    finished = SimpleNamespace(groups=[1, 2, 3, 4, 5, 6])

    def __init__(self) -> None:
        self.reported: list[Event] = []
        self.alarms = Alarms(AlarmSettings(), 1e-3, "my:Reward", self.reported.append)

    async def collect(self, *_: Any) -> Any:
        raise GenerationBudgetSpent("0 of 8 trajectories survived.")


def failed(folder: Path, keep: int, **fields: Any) -> str:
    config = RunConfig.model_validate(settings(folder, folder, keep_rollouts=keep))
    driver = made_driver(config, folder)
    driver.rollouts, driver.runner = RolloutManager(), EpisodeRunner(**fields)  # type: ignore[assignment]
    driver.services = SimpleNamespace(pools=[])  # type: ignore[assignment]
    with pytest.raises(GenerationBudgetSpent) as error:
        asyncio.run(driver.collect())
    return str(error.value)


class Broken(RolloutManager):
    async def run(self, *_: Any) -> Any:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._produce())

    async def _produce(self) -> None:
        raise GraderBroken("raised on each of the 4 trajectories.")


def test_a_broken_grader_is_reported_with_an_answer_that_broke_it(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    config = RunConfig.model_validate(settings(tmp_path, tmp_path, keep_rollouts=4))
    driver = made_driver(config, tmp_path)
    driver.rollouts, driver.runner = (
        Broken(),
        EpisodeRunner(reward=None, unscored="grader_error", flags=()),
    )  # type: ignore[assignment]
    driver.services = SimpleNamespace(pools=[])  # type: ignore[assignment]
    with pytest.raises(
        GraderBroken,
        match=(
            r"trajectories\. For example task task-1, .* answered '9': no reward \(grader_error\)"
        ),
    ):
        asyncio.run(driver.produce())


def test_groups_of_the_failed_step_are_kept_and_an_answer_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    why = failed(tmp_path, 4)
    rows = [
        json.loads(line)
        for line in (
            (tmp_path / "rollouts/step_000001.jsonl").read_text(encoding="utf-8").splitlines()
        )
    ]
    assert [row["group"] for row in rows] == [1, 2, 3, 4]
    assert why.startswith("0 of 8 trajectories survived.")
    assert "task task-1, truth [1, 2], was answered '9': reward 0 (unparsable)" in why
    assert "rollouts/step_000001.jsonl" in why


def test_an_answer_without_a_reward_is_quoted_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    assert "no reward (grader_error: KeyError)" in failed(
        tmp_path, 4, reward=None, unscored="grader_error: KeyError", flags=()
    )


def test_without_kept_rollouts_only_the_quote_is_left(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    assert "was answered" in failed(tmp_path, 0)
    assert not list((tmp_path / "rollouts").iterdir())


@pytest.mark.parametrize(("step", "evaluations"), [(7, 1), (6, 0)])
def test_a_policy_that_collapsed_ends_with_an_alarm_a_reason_and_an_evaluation(
    step: int, evaluations: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation is left out when the last finished step had one."""
    played: list[int] = []

    async def play(asked: Any, player: Any, step: int, *_: Any) -> list[Any]:
        played.append(step)
        return []

    monkeypatch.setattr("rayloop.cluster.loop.evaluating.evaluate_answers", play)
    values = settings(tmp_path, tmp_path, keep_rollouts=0, steps=20)
    values["data"]["eval"] = values["data"]["train"]
    values["evaluation"] = {"every": 3}
    monkeypatch.setattr(
        "rayloop.cluster.driver.held_out_rows", lambda *_: [SimpleNamespace(id="t", source="")]
    )
    monkeypatch.setattr("rayloop.cluster.loop.evaluating.answer_requests", lambda *_, **__: [])
    (tmp_path / "evaluations").mkdir()
    driver = made_driver(RunConfig.model_validate(values), tmp_path)
    rollouts = RolloutManager()
    driver.rollouts, driver.runner, driver.step = rollouts, EpisodeRunner(), step  # type: ignore[assignment]
    driver.services = SimpleNamespace(pools=[])  # type: ignore[assignment]
    for entropy in [2.2] * MEAN_STEPS + [1.5, 1.0, 0.5, 0.2, 0.05]:
        rollouts.alarms.recorded({ENTROPY: entropy})
    assert not rollouts.reported, "its mean of five steps is a third of the first"
    with pytest.raises(
        GenerationBudgetSpent,
        match=r"entropy is 0\.65 nats .* was 2\.2 at first.* learning rate is",
    ):
        asyncio.run(driver.collect())
    assert [type(event).__name__ for event in rollouts.reported] == ["Alarm"]
    assert played == [step] * evaluations


def test_trained_and_dropped_groups_are_recorded_in_turn(tmp_path: Path) -> None:
    """A page that shows trained groups alone cannot show why others were dropped."""
    driver: Any = made_driver(
        RunConfig.model_validate(settings(tmp_path, tmp_path, keep_rollouts=5)), tmp_path
    )
    driver.rollouts, driver.runner = RolloutManager(), SimpleNamespace(metrics=dict)
    driver.rollouts.alarms = SimpleNamespace(
        step=lambda _: None, looked=lambda _: None, unseen=False, recorded=lambda _: None
    )
    driver.reporter = SimpleNamespace(step=lambda *_: {}, updates=[], sight={})
    recorded = list[int]()

    async def dump(groups: Any, step: int) -> list[Any]:
        recorded.extend(group.number for group in groups)
        return []

    driver.dump = dump
    finished = [make_group(number, [0.0, 1.0]) for number in (9, 2, 3, 1, 4, 8)]
    trained = [group for group in finished if group.number in (2, 9, 4)]
    asyncio.run(driver.record({}, SimpleNamespace(groups=trained, ended_groups=finished)))
    assert recorded == [2, 1, 4, 3, 9]


# A step that changed nothing, and what its groups were trained with -------------------------------


def at_step(folder: Path, step: int, **changes: Any) -> Driver:
    driver = made_driver(
        RunConfig.model_validate(settings(folder, folder, steps=3, **changes)), folder
    )
    driver.step = step
    return driver


def skipped(driver: Driver) -> list[dict[str, Any]]:
    return [
        record for record in driver.reporter.folder.events if record["event"] == "updates_skipped"
    ]


def test_updates_that_were_skipped_are_said(tmp_path: Path) -> None:
    driver = at_step(tmp_path, 2)
    driver.notice_skipped({"actor/skipped_updates": 0.0, "actor/updates": 2.0})
    assert skipped(driver) == []
    driver.notice_skipped({"actor/skipped_updates": 1.0, "actor/updates": 1.0})
    driver.notice_skipped({"actor/skipped_updates": 2.0, "actor/updates": 0.0})
    assert [(record["skipped"], record["updates"]) for record in skipped(driver)] == [
        (1, 2),
        (2, 2),
    ]


def test_a_run_does_not_end_as_done_with_a_step_that_changed_nothing(tmp_path: Path) -> None:
    driver = at_step(tmp_path, 3)
    driver.notice_skipped({"actor/skipped_updates": 1.0, "actor/updates": 1.0})
    with pytest.raises(
        Diverged, match=r"each update of the last step was skipped.* Lower policy.optimizer.lr"
    ):
        driver.notice_skipped({"actor/skipped_updates": 1.0, "actor/updates": 0.0})
    assert len(skipped(driver)) == 2


@pytest.mark.parametrize("kind", ["reinforce_pp", "batch_std"])
def test_the_advantages_of_a_step_are_those_that_it_trains(kind: str, tmp_path: Path) -> None:
    """Records, console and metrics get them: over the deviation of the step."""
    driver = at_step(tmp_path, 0, algorithm__advantage={"kind": kind})
    groups = tuple(
        with_advantages(make_group(i, [1.0, 0.0, 0.5, 0.5]), driver.advantage) for i in range(2)
    )
    held: list[Any] = []

    async def collect(version: Any, inherited: Any, hold: Any) -> Collected:
        await hold(groups)
        return Collected(groups, groups)

    async def fetch(assigned: Any, **_: Any) -> set[Any]:
        held.extend(assigned)
        return set()

    driver.rollouts = SimpleNamespace(collect=collect)  # type: ignore[assignment]
    driver.services = SimpleNamespace(pools=[], policy=SimpleNamespace(fetch=fetch))  # type: ignore[assignment]
    collected = asyncio.run(driver.collect())
    found = [member.advantage for group in collected.groups for member in group.kept]
    assert found == [member.advantage for group in held for member in group.kept]
    assert found[0] == pytest.approx(0.5 / stdev([0.5, -0.5, 0.0, 0.0] * 2), rel=1e-5)
    assert groups[0].members[0].advantage == 0.5
