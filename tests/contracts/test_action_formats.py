"""What every action format must do: read the golden turns of its language, write them so that they
are read again, and answer every other text with what is wrong, in time that grows with its length.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
from collections.abc import Callable
from functools import partial
from typing import get_args

import pytest

from rayloop.envs.grammar.actions import (
    Actions,
    Button,
    Click,
    Drag,
    Finish,
    Hover,
    Mistake,
    Point,
    Scroll,
    Unsupported,
)
from rayloop.envs.grammar.language import Language, action_format
from rayloop.envs.grammar.rules import Extent
from tests.support.growth import grows_with_length
from tools.pages.compatible.golden_turns import FAMILIES, GoldenTurn, golden_turns, screen

TURNS = [turn for family in FAMILIES for turn in golden_turns(family)]
READABLE = [turn for turn in TURNS if "refused" not in turn.others]
FUZZED_TEXTS = int(os.environ.get("FUZZED_TEXTS", "2000"))
"""Texts of each format."""


def language(family: str) -> Language:
    """A family's language, which has rules of calls."""
    found = action_format(family)
    assert isinstance(found, Language)
    return found


WITH_CALLS = [name for name in FAMILIES if name != "ui_tars"]
JSON_FAMILIES = [
    name for name in WITH_CALLS if language(name).written.form in ("function", "object")
]
PYTHON_FAMILIES = [name for name in WITH_CALLS if language(name).written.form == "python"]


def read(family: str, text: str) -> Actions | Mistake:
    return action_format(family).read(text, screen(family))


def assert_refused(family: str, text: str, reason: str = "") -> Mistake:
    found = read(family, text)
    assert isinstance(found, Mistake), text[:200]
    assert found.reason
    assert reason in found.reason
    assert 0 <= found.position <= len(text)
    assert text[found.position :].startswith(found.near)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_golden_turns(family: str) -> None:
    assert len(golden_turns(family)) >= 12


@pytest.mark.parametrize("turn", READABLE, ids=str)
def test_a_golden_turn_is_read(turn: GoldenTurn) -> None:
    found = read(turn.family, turn.text)
    assert isinstance(found, Actions), found
    assert found.actions == turn.actions
    assert found.thought == turn.others.get("thought", found.thought)
    assert found.summary == turn.others.get("summary", found.summary)


@pytest.mark.parametrize("turn", READABLE, ids=str)
def test_what_is_written_is_read_again(turn: GoldenTurn) -> None:
    written_by = action_format(turn.family)
    turn_read = written_by.read(turn.text, screen(turn.family))
    assert isinstance(turn_read, Actions)
    if "one_way" in turn.others:
        with pytest.raises(ValueError, match="no words for"):
            written_by.write(turn_read, screen(turn.family))
        return
    text = written_by.write(turn_read, screen(turn.family))
    assert written_by.read(text, screen(turn.family)) == turn_read


@pytest.mark.parametrize("turn", [turn for turn in TURNS if "refused" in turn.others], ids=str)
def test_a_spelling_that_is_not_read_is_refused(turn: GoldenTurn) -> None:
    assert_refused(turn.family, turn.text)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_that_is_cut_is_a_mistake_or_what_was_written_until_then(family: str) -> None:
    for turn in golden_turns(family):
        whole = read(family, turn.text)
        for end in range(len(turn.text)):
            cut = read(family, turn.text[:end])
            if isinstance(cut, Mistake):
                assert 0 <= cut.position <= end
                assert cut.reason
            elif isinstance(whole, Actions):
                kinds = [type(action) for action in whole.actions]
                # What is cut off a text or a number leaves an action of the same kind.
                assert [type(action) for action in cut.actions] == kinds[: len(cut.actions)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "text", ["", " ", "\n" * 100, "\ud800", "\x00", "I think.", "{", "<", "[" * 50]
)
def test_a_text_that_is_no_turn_is_refused(family: str, text: str) -> None:
    assert_refused(family, text)


def one(family: str, arguments: str) -> str:
    """A turn with these JSON arguments of the family's call."""
    form = language(family).written
    if form.form == "object":
        return form.calls.replace("{}", arguments)
    function = language(family).rules[0].function or "click"
    return form.calls.replace("{}", f'{{"name": "{function}", "arguments": {arguments}}}')


def first_click(family: str) -> dict[str, object]:
    """The arguments of the first golden turn that clicks at a point, as JSON has them."""
    rules = language(family)
    text = rules.write(Actions("", (Click(Point(10, 20)),)), screen(family))
    value = json.loads(text[text.index("{") : text.rindex("}") + 1])
    inner = value.get("arguments", value.get(rules.written.inside, value))
    assert isinstance(inner, dict)
    return inner


@pytest.mark.parametrize("family", JSON_FAMILIES)
def test_wrong_values_of_json_are_said(family: str) -> None:
    arguments = first_click(family)
    good = read(family, one(family, json.dumps(arguments)))
    assert isinstance(good, Actions)
    assert good.actions == (Click(Point(10, 20)),)
    assert_refused(family, one(family, json.dumps({**arguments, "colour": "red"})), "not 'colour'")
    name = next(iter(arguments)) if language(family).name_keys else ""
    if name:
        assert_refused(
            family, one(family, json.dumps({**arguments, name: "fly"})), "unknown action 'fly'"
        )
        assert_refused(family, one(family, json.dumps({**arguments, name: 5})))
    place = next(key for key, value in arguments.items() if value in (10, [10, 20]))
    pair = isinstance(arguments[place], list)
    for number in (
        "1e999",
        "NaN",
        "-Infinity",
        "5000",
        "-1",
        '"10"',
        "null",
        "true",
        "[[[10]]]",
        "{}",
    ):
        written = f"[{number}, 20]" if pair else number
        text = one(family, json.dumps({**arguments, place: "HERE"}).replace('"HERE"', written))
        assert_refused(family, text)
    outside = [5000, 20] if pair else 5000
    assert_refused(
        family, one(family, json.dumps({**arguments, place: outside})), "must be a point in 0.."
    )


@pytest.mark.parametrize("family", PYTHON_FAMILIES)
@pytest.mark.parametrize(
    "code",
    [
        "__import__('os').system('id')",
        "import os; os.system('id')",
        "click(x=open('/etc/passwd').read(), y=1)",
        "click(x=1+1, y=1)",
        "[click(x=1, y=1) for i in range(9)]",
        "click(**{'x': 1})",
        "while True: pass",
        "click(x=" + "(" * 1000,
        "click(x=" + "-" * 10_000 + "1)",
        "click(x='" + "a" * 100_000,
        "click(x=9" + "9" * 5000 + ", y=1)",
        "click(colour='red')",
        "fly(x=1, y=1)",
    ],
)
def test_code_that_is_not_calls_with_constants_is_refused(family: str, code: str) -> None:
    """No code is run: these are names and values that no language has."""
    assert_refused(family, language(family).written.calls.replace("{}", code))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("opening", ["[", "{", '{"a":', '{"action":', "(", "click(", "<think>"])
def test_deep_and_long_texts_are_refused(family: str, opening: str) -> None:
    calls = "{}" if family == "ui_tars" else language(family).written.calls
    assert_refused(family, calls.replace("{}", opening * 10_000))
    assert_refused(family, opening * (1_000_000 // len(opening)))


@pytest.mark.parametrize("family", WITH_CALLS)
def test_a_thought_that_quotes_an_action_stays_a_thought(family: str) -> None:
    written_by = language(family)
    quoted = written_by.write(Actions("", (Finish(),)), screen(family))
    turn = Actions("", (Click(Point(1, 0)),))
    text = written_by.write(turn, screen(family))
    found = read(family, f"<think>I could end it: {quoted}</think>\n{text}")
    assert isinstance(found, Actions)
    assert found.actions == turn.actions


def test_several_actions_where_a_turn_has_one() -> None:
    two = '{"action_type": "wait"}\n{"action_type": "wait"}'
    assert_refused("android_world", f"Action: {two}", "a turn has one action")
    found = read("qwen3_vl", "\n".join([golden_turns("qwen3_vl")[2].text] * 2))
    assert isinstance(found, Actions)
    assert len(found.actions) == 2


def test_another_language_is_refused() -> None:
    """Each language's turns are mistakes in those whose marks differ."""
    others = {
        "ui_tars": "qwen3_vl",
        "qwen3_vl": "opencua",
        "opencua": "internvl",
        "internvl": "qwen3_5",
        "mobilegym": "ui_tars",
        "anthropic_computer": "opencua",
    }
    for family, reader in others.items():
        for turn in golden_turns(family):
            assert_refused(reader, turn.text)


def test_what_a_language_lacks_is_written_by_others_or_refused() -> None:
    qwen = language("qwen3_vl")
    unit = Extent(1000, 1000)
    drag = qwen.read(qwen.write(Actions("", (Drag(Point(1, 2), Point(3, 4)),)), unit), unit)
    assert isinstance(drag, Actions)
    assert drag.actions == (Hover(Point(1, 2)), Drag(None, Point(3, 4)))
    scroll = qwen.read(qwen.write(Actions("", (Scroll("down", Point(1, 2)),)), unit), unit)
    assert isinstance(scroll, Actions)
    assert scroll.actions == (Hover(Point(1, 2)), Scroll("down", amount=5))
    with pytest.raises(ValueError, match="no words for"):
        qwen.write(Actions("", (Unsupported("fly"),)), unit)
    with pytest.raises(ValueError, match="one action in a turn"):
        language("mobilegym").write(Actions("", (Finish(), Finish())), unit)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_click_of_any_button_is_read_as_written_or_refused(family: str) -> None:
    speech = action_format(family)
    unit = Extent(1000, 1000)
    for button, times in itertools.product(get_args(Button), (1, 2, 3)):
        click = Click(Point(100, 200), button, times)
        try:
            text = speech.write(Actions("", (click,)), unit)
        except ValueError as error:
            assert re.search("no (words|name) for", str(error))  # noqa: PT017, some are written
            continue
        read = speech.read(text, unit)
        assert isinstance(read, Actions), (text, read)
        assert read.actions == (click,)


PIECES = (
    *('{"', '"}', "[", "]", "(", ")", ",", ":", '"', "'", "\\", "\n", " ", "NaN", "1e999", "-5"),
    *("<tool_call>", "</tool_call>", "<function=", "<parameter=", "</parameter>", "</function>"),
    *("```python\n", "```", "<action>", "</action>", "Action:", "Thought:", "<|begin_of_box|>"),
    *(
        "<think>",
        "</think>",
        "Grounded Operation:",
        "pyautogui.click(x=",
        "<ANSWER>",
        "\ud800",
        "é",
    ),
)


def fuzzed(family: str, random_: random.Random) -> str:
    """A golden turn with pieces put in, taken out and exchanged, or pieces alone."""
    texts = [turn.text for turn in golden_turns_of[family]]
    text = random_.choice(texts) if random_.random() < 0.9 else ""
    for _ in range(random_.randint(1, 6)):
        start = random_.randint(0, len(text))
        end = min(len(text), start + random_.choice((0, 0, 1, 5, 40)))
        other = random_.choice(texts)
        begin = random_.randint(0, len(other))
        piece = random_.choice((random_.choice(PIECES), other[begin : begin + 30]))
        text = text[:start] + piece * random_.choice((1, 1, 1, 3, 50)) + text[end:]
    return text


golden_turns_of = {family: golden_turns(family) for family in FAMILIES}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_text_raises(family: str) -> None:
    random_ = random.Random(family)
    turns = 0
    for _ in range(FUZZED_TEXTS):
        text = fuzzed(family, random_)
        found = read(family, text)
        if isinstance(found, Mistake):
            assert 0 <= found.position <= len(text)
            continue
        turns += 1
        assert found.actions
    assert 0 < turns < FUZZED_TEXTS, "the texts are neither all turns nor all mistakes"


def many(piece: str, frame: str, length: int) -> str:
    return frame.replace("{}", piece * (length // len(piece)))


@pytest.mark.parametrize("family", FAMILIES)
def test_time_grows_with_the_length(family: str) -> None:
    calls = "Action: {}" if family == "ui_tars" else language(family).written.calls
    turn = golden_turns(family)[0].text
    for frame in ("{}", calls, turn + "{}", "{}" + turn):
        for piece in (*PIECES, "Action: ", "\n\n", '{"action": "wait"}\n', turn + "\n"):
            text: Callable[[int], str] = partial(many, piece, frame)
            assert grows_with_length(partial(read, family), text, 2000), (frame, piece)
