"""Environments in the language of their model: turns, coordinates, the reward, marks of a strip."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rayloop.core.protocols import StepResult
from rayloop.envs.grammar.actions import Action, Click, Point
from rayloop.envs.grammar.language import action_format, names
from rayloop.envs.grammar.screens import Pointing, ScreenEnvironment, ScreenSettings
from rayloop.recipes.arpo.reward import ArpoReward
from rayloop.view.filmstrip import _actions

QWEN = (
    '<tool_call>\n{"name": "computer_use", "arguments": {"action": "left_click", "coordinate":'
    " [500, 250]}}\n</tool_call>"
)
UI_TARS = "Action: click(start_box='(500,250)')"


class Listening(ScreenEnvironment):
    """A screen of 200 x 100 pixels that only writes down what it is asked for."""

    def __init__(self, settings: ScreenSettings) -> None:
        super().__init__(settings)
        self.done: list[Action] = []

    def screen_size(self) -> tuple[int, int]:
        return 200, 100

    def _carry_out(self, actions: Sequence[Action]) -> StepResult:
        for action in actions:
            self.done += self.basic(action)
        return StepResult()


def test_a_turn_in_the_language_of_the_settings_is_carried_out() -> None:
    environment = Listening(ScreenSettings(language="qwen3_vl"))
    assert environment.step(QWEN).error is None
    assert environment.done == [Click(Point(100, 25))]
    refused = environment.step(UI_TARS).error
    assert refused is not None
    assert "<tool_call>" in refused
    other = Listening(ScreenSettings())
    assert other.step(UI_TARS).error is None
    assert other.step(QWEN).error is not None


def test_coordinates_are_the_languages_unless_settings_say_others() -> None:
    def pointing(**settings: object) -> Pointing:
        return ScreenSettings.model_validate(settings).pointing

    assert pointing() == Pointing()
    assert pointing(language="qwen3_vl") == Pointing(coordinates="relative", factor=32)
    assert pointing(language="qwen3_vl", pointing={"factor": 16}).factor == 16
    assert pointing(language="qwen3_vl", pointing={"coordinates": "absolute"}).coordinates == (
        "absolute"
    )
    fraction = pointing(language="aguvis")
    assert fraction.on(Click(Point(0.5, 0.25)), 200, 100) == Click(Point(100, 25))
    assert fraction.written(Click(Point(67, 25)), 200, 100) == Click(Point(0.335, 0.25))
    with pytest.raises(ValueError, match="'klingon' is not a language; there are aguvis"):
        pointing(language="klingon")


def test_the_rewards_format_and_the_strips_marks_are_of_the_language() -> None:
    qwen, ui_tars = (
        ArpoReward(ArpoReward.Settings(language=name)) for name in ("qwen3_vl", "ui_tars")
    )
    assert qwen._flags(QWEN) == ui_tars._flags(UI_TARS) == ()
    assert qwen._flags(UI_TARS) == ui_tars._flags(QWEN) == ("unparsable",)
    screen = {"language": "qwen3_vl", "pointing": {"coordinates": "relative"}}
    assert _actions(QWEN, screen, 200, 100) == [Click(Point(100, 25))]
    assert _actions(UI_TARS, screen, 200, 100) == ()


@pytest.mark.parametrize("name", names())
def test_a_languages_coordinates_are_settings(name: str) -> None:
    assert ScreenSettings(language=name).language == name
    assert action_format(name).family == name
