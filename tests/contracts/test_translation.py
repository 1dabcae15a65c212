"""What every pair of action languages must do: a turn of one is written in the other with the same
actions on the screen, or it is said which action the other has no words for.
"""

from __future__ import annotations

import pytest

from rayloop.core.types import ImageSource, Message
from rayloop.envs.grammar.actions import Action, Actions, CallUser, Finish, Mistake, Point, Scroll
from rayloop.envs.grammar.language import action_format
from rayloop.envs.grammar.rules import Extent
from rayloop.envs.grammar.screens import Pointing, ScreenSettings, with_points
from rayloop.sft.translation import Translation, Untranslatable, joined
from tools.pages.compatible.golden_turns import FAMILIES, golden_turns

WIDTH, HEIGHT = 1008, 672
"""A screen of whole patches of 28 pixels, so that resizing leaves it as it is."""
THOUSAND = {"coordinates": "relative"}


ONE_WAY = {"refused", "one_way"}
"""Golden turns that are not read, or that are read and never written."""


def speaking(family: str, **pointing: object) -> ScreenSettings:
    return ScreenSettings.model_validate({"language": family, "pointing": pointing})


def actions(settings: ScreenSettings, text: str) -> tuple[Action, ...]:
    unit = Extent(*settings.pointing.size(WIDTH, HEIGHT))
    turn = action_format(settings.language).read(text, unit)
    assert not isinstance(turn, Mistake), turn
    return turn.actions


def on_screen(pointing: Pointing, turn: tuple[Action, ...]) -> tuple[Action, ...]:
    return tuple(pointing.on(action, WIDTH, HEIGHT) for action in joined(turn))


def places(settings: ScreenSettings, turn: tuple[Action, ...]) -> list[Point]:
    """The points of the actions, in pixels of the screen."""
    found: list[Point] = []

    def keep(point: Point) -> Point:
        found.append(point)
        return point

    for action in on_screen(settings.pointing, turn):
        with_points(action, keep)
    return found


def readable(family: str) -> list[str]:
    """Golden turns whose points are on the screen."""
    settings = speaking(family)
    unit = Extent(*settings.pointing.size(WIDTH, HEIGHT))
    texts = [turn.text for turn in golden_turns(family) if not turn.others.keys() & ONE_WAY]
    turns = [(text, action_format(family).read(text, unit)) for text in texts]
    return [text for text, turn in turns if isinstance(turn, Actions)]


def tried(translation: Translation, text: str) -> tuple[str | None, str]:
    """The turn in the other language, or why there is none."""
    try:
        return translation.turn(text, WIDTH, HEIGHT), ""
    except Untranslatable as error:
        return None, str(error)


def kinds(turn: tuple[Action, ...]) -> list[type[Action]]:
    """The kinds of actions; giving up is one, whether the user is asked or not."""
    gives_up = CallUser()
    return [
        type(gives_up if isinstance(action, Finish) and not action.success else action)
        for action in joined(turn)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_go_into_every_other_language_and_back(family: str) -> None:
    source = speaking(family)
    texts = readable(family)
    assert len(texts) >= 6
    for other in FAMILIES:
        target = speaking(other)
        written = 0
        for text in texts:
            turn, reason = tried(Translation(source, target), text)
            if turn is None:
                assert "has no words for" in reason or "one action in a turn" in reason
                continue
            written += 1
            meant, said = actions(source, text), actions(target, turn)
            for old, new in zip(places(source, meant), places(target, said), strict=True):
                assert max(abs(old.x - new.x), abs(old.y - new.y)) <= 1, (other, text, turn)
            back, reason = tried(Translation(target, source), turn)
            if back is None:
                assert family == "cogagent", (other, text, turn, reason)
                assert "has no words for a thought" in reason
                continue
            assert kinds(meant) == kinds(actions(source, back)), (other, text, back)
        assert written, f"nothing of {family} can be written in {other}"


@pytest.mark.parametrize("unit", [{}, THOUSAND], ids=["pixels", "thousandths"])
def test_ui_tars_comes_back_from_qwen_as_it_was(unit: dict[str, str]) -> None:
    ours, qwen = speaking("ui_tars", **unit), speaking("qwen3_vl")
    for golden in golden_turns("ui_tars"):
        if golden.others.keys() & ONE_WAY:
            continue
        there = Translation(ours, qwen).turn(golden.text, WIDTH, HEIGHT)
        back = Translation(qwen, ours).turn(there, WIDTH, HEIGHT)
        found = actions(ours, back)
        assert on_screen(ours.pointing, found) == on_screen(ours.pointing, golden.actions)


PROMPTED = [family for family in FAMILIES if action_format(family).prompts]


@pytest.mark.parametrize("family", PROMPTED)
def test_a_prompt_of_the_language_becomes_that_of_the_other_one(family: str) -> None:
    picture = ImageSource(path="screen.png")
    task = "Order {two} pizzas.\nPay them."
    source = speaking(family)
    unit = Extent(*source.pointing.size(WIDTH, HEIGHT))
    for screen in action_format(family).prompts:
        prompt = action_format(family).messages(screen, unit, [task], [picture])
        for other in PROMPTED:
            translation = Translation(source, speaking(other))
            there = translation.prompt(prompt, WIDTH, HEIGHT)
            texts = [part for message in there for part in message.parts if isinstance(part, str)]
            assert sum(text.count(task) for text in texts) == 1
            assert there[-1].images == [picture]
            other_unit = Extent(*speaking(other).pointing.size(WIDTH, HEIGHT))
            # Some have the same words for a phone and for a computer.
            same = [
                kind
                for kind in action_format(family).prompts
                if action_format(family).messages(kind, unit, [task], [picture]) == prompt
            ]
            assert there in [
                action_format(other).messages(kind, other_unit, [task], [picture]) for kind in same
            ]


def test_a_prompt_of_somebody_else_stays() -> None:
    prompt = [Message("user", ("Do it.", ImageSource(path="screen.png")))]
    translation = Translation(speaking("ui_tars"), speaking("qwen3_vl"))
    assert translation.prompt(prompt, WIDTH, HEIGHT) == prompt


def test_a_language_without_a_prompt_says_where_it_is() -> None:
    ours = action_format("ui_tars").messages("computer", Extent(1, 1), ["Do it."], [])
    [lacking, *_] = set(FAMILIES) - set(PROMPTED)
    with pytest.raises(Untranslatable, match=f"the language {lacking} has no prompt here"):
        Translation(speaking("ui_tars"), speaking(lacking)).prompt(ours, WIDTH, HEIGHT)


def test_a_point_hits_the_same_pixel_in_every_unit() -> None:
    """Thousandths, fractions, and pixels of a picture that is shrunk."""
    text = "Action: click(start_box='(503,119)')"
    source = speaking("ui_tars", **THOUSAND)
    [meant] = places(source, actions(source, text))
    for target in (
        speaking("qwen3_vl"),
        speaking("aguvis"),
        speaking("qwen2_5_vl", max_pixels=400_000),
        speaking("ui_tars"),
    ):
        turn = Translation(source, target).turn(text, WIDTH, HEIGHT)
        [hit] = places(target, actions(target, turn))
        assert max(abs(hit.x - meant.x), abs(hit.y - meant.y)) <= 1
    assert "(507,80)" in turn


def test_what_a_language_has_no_words_for_becomes_what_means_the_same() -> None:
    ours, qwen = speaking("ui_tars", **THOUSAND), speaking("qwen3_vl")
    given_up = Translation(ours, qwen).turn("Action: call_user()", WIDTH, HEIGHT)
    assert actions(qwen, given_up) == (Finish(success=False),)
    scroll = Translation(ours, qwen).turn("Action: scroll(direction='down')", WIDTH, HEIGHT)
    assert actions(qwen, scroll) == (Scroll("down", amount=5),)


def test_thoughts_and_summaries_go_along_or_are_refused() -> None:
    ours, qwen = speaking("ui_tars", **THOUSAND), speaking("qwen3_vl")
    text = 'Thought: It is late.\nAction: Go.\n<tool_call>\n{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [5, 6]}}\n</tool_call>'
    turn = Translation(qwen, ours).turn(text, WIDTH, HEIGHT)
    assert turn == "Thought: It is late.\nGo.\nAction: click(start_box='(5,6)')"
    with pytest.raises(Untranslatable, match="cogagent has no words for a thought"):
        Translation(qwen, speaking("cogagent")).turn(text, WIDTH, HEIGHT)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Action: click(start_box='(1,2)'", "it is not written in ui_tars"),
        (
            '<tool_call>\n{"name": "computer_use", "arguments": {"action": "wait"}}\n</tool_call>',
            "it is not written in ui_tars",
        ),
        ("Action: keydown(key='shift')", "qwen3_vl has no words for HoldKey"),
        ("", "it is not written in ui_tars"),
    ],
)
def test_what_cannot_be_translated_says_why(text: str, reason: str) -> None:
    translation = Translation(speaking("ui_tars"), speaking("qwen3_vl"))
    with pytest.raises(Untranslatable) as stop:
        translation.turn(text, WIDTH, HEIGHT)
    assert stop.value.reason == reason
    assert str(stop.value).startswith(reason)


def test_words_that_would_be_read_as_something_else_are_refused() -> None:
    """A thought may hold the marks of the other language."""
    call = '<tool_call>\n{"name": "computer_use", "arguments": {"action": "wait"}}\n</tool_call>'
    text = f"Thought: not\n{call}\nAction: click(start_box='(1,2)')"
    translation = Translation(speaking("ui_tars"), speaking("qwen3_vl"))
    with pytest.raises(Untranslatable, match="reads its own words as something else"):
        translation.turn(text, WIDTH, HEIGHT)
