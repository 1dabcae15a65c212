"""``replay`` of rewards by a judge: from the verdicts on record, and from another judge."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rayloop.cli import main
from rayloop.config.settings import Component
from rayloop.core.groups import Outcome, Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import TrajectoryId
from rayloop.replay.bundle import plain_of
from rayloop.rewards.scoring import RewardScoring
from rayloop.rewards.settings import RewardSettings
from rayloop.rollout.step_record import step_from_plain
from rayloop.run.folder import RunFolder
from tests.support.judge_stub import JudgeStub, results, serving
from tests.support.recorded_steps import groups, kept_step, texts


def source(url: str) -> dict[str, Any]:
    """A judge of whole answers, whose client is quick."""
    judge = {"url": url, "backoff": 0.01, "backoff_max": 0.05, "canary": False}
    return {"use": "rayloop.judge.reward:JudgeReward", "with": {"answer": "whole", "judge": judge}}


async def _judged(url: str, model: Path) -> dict[TrajectoryId, Outcome]:
    """The outcomes as a reward actor has them from the judge at ``url``."""
    settings = RewardSettings(source=Component.model_validate(source(url)))
    scoring = RewardScoring(settings)
    outcomes = {}
    for group in groups(model):
        members = [member for member in group.members if member.payload is not None]
        for member, record in zip(members, texts(group), strict=True):
            answers = [turn.text for turn in record.turns if turn.sampled]
            payload: Any = member.payload
            contexts = [ScoreContext(group.step, answers, 100.0)]
            [outcome] = await scoring.score_together([payload], group.task, contexts)
            outcomes[payload.id] = outcome
    await scoring.source.client.close()
    return outcomes


@pytest.fixture(scope="module")
def kept(tiny_vlm: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A step whose judge, now away, called the answers of each first member right."""
    with serving(JudgeStub()) as stub:
        right, wrong = results(), results(verdict="incorrect", score=0.0)
        stub.script = [right, wrong, wrong] * 3 + [right, wrong]
        outcomes = asyncio.run(_judged(stub.url, tiny_vlm))
        folder = tmp_path_factory.mktemp("judged")
        return kept_step(folder, tiny_vlm, outcomes, reward__source=source(stub.url))


def test_the_verdicts_on_record_are_the_judges(
    kept: RunFolder, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["replay", str(kept.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stages"]["rewards"] == {"equal": 11, "total": 11, "differences": []}
    out = tmp_path / "step.bundle"
    assert main(["bundle", str(kept.path), "--step", "7", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "11 of 11 rewards" in printed
    assert b"127.0.0.1" not in out.read_bytes()


def test_another_judge_is_asked(kept: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(JudgeStub()) as stub:
        stub.always = results(verdict="correct", score=1.0)
        command = ["replay", str(kept.path), "--judge", stub.url, "--json"]
        assert main(command) == 0
        assert len(stub.asked) >= 9, "equal questions are asked once"
    found = json.loads(capsys.readouterr().out)
    assert [group["reward"]["now"] for group in found["groups"]] == [1.0] * 4
    assert found["groups"][0]["reward"]["then"] == pytest.approx(1 / 3)
    assert found["groups"][0]["statuses"] == [
        f"{sample}: kept -> filtered[all_right]" for sample in range(3)
    ]


def test_a_judge_that_does_not_answer_is_a_sentence(
    kept: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(kept.path), "--judge", "http://127.0.0.1:9"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "--judge: no judge answers" in printed.err


def test_outcomes_keep_the_verdicts_that_they_are_made_of(kept: RunFolder) -> None:
    step = step_from_plain(plain_of(kept, 7), "step 7")
    outcomes = [member.outcome for group in step.groups for member in group.members]
    verdicts = [one.verdicts for one in outcomes if isinstance(one, Scored)]
    assert [len(each) for each in verdicts] == [1] * 11
    assert {each[0]["components"]["by_model"] for each in verdicts} == {1.0}
