"""Grounding in the language of a model: the prompt of its rows, and the click of its answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayloop import recipes
from rayloop.core.groups import Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task
from rayloop.engines.shape import ModelSource
from rayloop.envs.grammar.screens import ScreenSettings
from rayloop.recipes.arc_vision.click_reward import ClickReward
from rayloop.recipes.arc_vision.data import ScreenRows
from rayloop.rewards.saved import EMPTY_TRAJECTORY
from rayloop.run.config import read
from rayloop.run.preflight import Prepared
from tests.support.pictures import picture
from tests.support.runs import ROOT
from tests.unit.run.test_language import model

TRUTH = (0.4, 0.4, 0.6, 0.6)
CALL = (
    '<tool_call>\n{"name": "computer_use", "arguments": {"action": "left_click", "coordinate":'
    " [%s]}}\n</tool_call>"
)


@pytest.mark.parametrize(
    ("language", "answer", "value", "flags"),
    [
        ("qwen3_vl", CALL % "500, 500", 1.0, ()),
        ("qwen3_vl", CALL % "700, 500", 0.0, ()),
        # 200 x 100 pixels become 196 x 112 in patches of 28, whose middle is at (98, 56).
        ("qwen2_5_vl", CALL % "98, 56", 1.0, ()),
        ("aguvis", "pyautogui.click(x=0.5, y=0.5)", 1.0, ()),
        ("qwen3_vl", "<bbox>[0.4,0.4,0.6,0.6]</bbox>", 0.0, ("unparsable",)),
        ("qwen3_vl", CALL.replace("left_click", "wait") % "1, 1", 0.0, ("unparsable",)),
    ],
)
def test_a_click_is_read_by_the_coordinates_of_the_language(
    language: str, answer: str, value: float, flags: tuple[str, ...]
) -> None:
    task = Task("t", (), TRUTH, extra={"image_size": [200, 100]})
    reward = ClickReward(ScreenSettings(language=language))
    scored = reward.score(EMPTY_TRAJECTORY, task, ScoreContext(0, [answer]))
    assert isinstance(scored, Scored)
    assert (scored.value, scored.components["click"], scored.flags) == (value, value, flags)


def test_rows_are_asked_with_the_prompt_of_the_language(tmp_path: Path) -> None:
    (tmp_path / "screen.png").write_bytes(picture(200, 100))
    row = {"id": "a", "image": "screen.png", "instruction": "Open it.", "bbox": TRUTH}
    reader = ScreenRows(ScreenRows.Settings(language="qwen2_5_vl"))
    task = reader.task(row, "rows:1", tmp_path)
    system, user = task.messages
    assert "196x112" in system.parts[0]
    assert user.parts[0] == "Open it."
    assert len(task.images) == 1
    assert not task.bare


def test_the_protocol_has_the_language_of_the_model(tmp_path: Path) -> None:
    layers = [recipes.benchmarks()["screenspot_click"]]
    config = read(ROOT / "recipes/arc_vision/arc_vision.yaml", [], layers)
    source = ModelSource(model(tmp_path / "model", "qwen3_vl").path)
    spoken = Prepared(config, source).speaking().config
    assert spoken.data.reader.with_["language"] == "qwen3_vl"
    assert spoken.reward.source.with_["language"] == "qwen3_vl"
