"""ARPO's own reading of a turn, mistakes included, besides the published vectors."""

from __future__ import annotations

import re
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloop.core.groups import Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import EndReason, Sampling, Task, Trajectory, TrajectoryId
from rayloop.envs.grammar.arpo import Broken, add_box_token, parsed, repaired, resized
from rayloop.recipes.arpo.reward import ArpoReward


def last(text: str) -> list[str]:
    return [one.code.rstrip().rpartition("\n")[2] for one in parsed(text)]


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (
            "left_double(start_box='(966,546)')",
            "pyautogui.doubleClick(960.0, 540.0, button='left')",
        ),
        ("right_single(start_box='(0,0)')", "pyautogui.click(0.0, 0.0, button='right')"),
        ("hover(start_box='(966,546,1932,1092)')", "pyautogui.moveTo(1440.0, 810.0)"),
        (
            "drag(start_box='(0,0)', end_box='(966,546)')",
            "pyautogui.dragTo(960.0, 540.0, duration=1.0)",
        ),
        ("select(start_box='(0,0)')", "'''"),
        ("scroll(direction='down')", "pyautogui.scroll(-5)"),
        ("scroll(start_box='(966,546)', direction='up')", "pyautogui.scroll(5, x=960.0, y=540.0)"),
        ("scroll(direction='left')", "'''"),
        ("hotkey(key='ctrl c')", "pyautogui.hotkey('ctrl', 'c')"),
        ("hotkey(key='arrowleft')", "pyautogui.hotkey('left')"),
        ("hotkey(key='ctrl space')", "pyautogui.hotkey('ctrl', ' ')"),
        ("keydown(key='space')", "pyautogui.keyDown('space')"),
        ("keyup(key='arrowup')", "pyautogui.keyUp('arrowup')"),
        ("type(content='it's')", "time.sleep(0.5)"),
        ("type(content='')", "'''"),
        ("wait()", "wait"),
        ("error_env()", "error_env"),
        ("call_user()", "call_user"),
        ("nonsense(a='b')", "# Unrecognized action type: nonsense"),
        ("finished(content='it's done')", "finished"),
        ("finished()", "finished"),
    ],
)
def test_each_call_becomes_code(call: str, line: str) -> None:
    assert last(f"Thought: t\nAction: {call}") == [line]


@pytest.mark.parametrize("word", ["wait", "error_env", "call_user", "finished"])
def test_the_calls_behind_an_ending_word_are_never_made(word: str) -> None:
    calls = parsed(f"Thought: t\nAction: hotkey(key='a')\n\n{word}()\n\nclick()")
    assert [one.name for one in calls] == ["hotkey", word]
    with pytest.raises(Broken, match="TypeError"):
        parsed(f"Thought: t\nAction: click()\n\n{word}()")
    with pytest.raises(Broken, match="ValueError"):
        parsed(f"Thought: t\nAction: {word}()\n\nclick(")


def test_a_text_is_written_as_code_with_its_new_line_as_enter() -> None:
    (typed,) = parsed("Action: type(content='it's ok\\n')")
    assert typed.inputs == {"content": "it's ok\n"}
    assert "pyautogui.write('it\\'s ok', interval=0.1)" in typed.code
    assert typed.code.endswith("pyautogui.press('enter')")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("press(key='a')", "UnboundLocalError"),
        ("click()", "TypeError"),
        ("click(start_box='(1,2,3)')", "UnboundLocalError"),
        ("drag(start_box='(1,2,3)', end_box='(1,2)')", "ValueError"),
        ("click(start_box='(a,b)')", "ValueError"),
        ("click(start_box='(nan,1)')", "NameError"),
        ("click(start_box=(1,2))", "AttributeError"),
        ("click(start_box='(1,2)'", "ValueError"),
        ("click", "ValueError"),
        ("wait()\n\n\nwait()", "ValueError"),
        ("wait() and more", "ValueError"),
        ("", "ValueError"),
    ],
)
def test_where_the_original_raises_the_format_is_wrong(call: str, error: str) -> None:
    with pytest.raises(Broken, match=error):
        parsed(f"Thought: t\nAction: {call}")


def test_the_last_action_counts_and_several_are_in_order() -> None:
    turn = "Action: wait()\nAction: keyup(key='a')\n\nhotkey(key='a')"
    assert last(turn) == ["pyautogui.keyUp('a')", "pyautogui.hotkey('a')"]


@given(st.text(alphabet="Action: click(start_box='12,)\n\\\"{}<|>"))
def test_no_text_raises_anything_else(text: str) -> None:
    with suppress(Broken):
        parsed(f"Action: {text}")
    add_box_token(text)


@pytest.mark.parametrize(
    ("text", "made"),
    [
        (
            "Action: drag(start_box='(1,2)', end_box='(3,4)')",
            (
                "Action: drag(start_box='<|box_start|>(1,2)<|box_end|>',"
                " end_box='<|box_start|>(3,4)<|box_end|>')"
            ),
        ),
        ("Action: click(start_box='(1, 2)')", "Action: click(start_box='(1, 2)')"),
        ("click(start_box='(1,2)')", "click(start_box='(1,2)')"),
        ("Action: wait()\n", "Action: wait()\n"),
        (
            "t\nAction: a\nAction: click(start_box='(1,2)') ",
            "t\nAction: a\n\nclick(start_box='<|box_start|>(1,2)<|box_end|>')",
        ),
    ],
)
def test_box_tokens_are_put_back_where_there_is_no_blank(text: str, made: str) -> None:
    assert add_box_token(text) == made


@pytest.mark.parametrize(
    ("size", "made"),
    [
        ((1080, 1920), (1092, 1932)),
        ((720, 1280), (728, 1288)),
        ((2160, 3840), (1064, 1932)),
        ((20, 20), (56, 56)),
    ],
)
def test_a_screen_is_resized_within_the_originals_limits(
    size: tuple[int, int], made: tuple[int, int]
) -> None:
    assert resized(*size) == made


def score(variant: str, result: float | None, text: str) -> object:
    reward = ArpoReward(ArpoReward.Settings.model_validate({"variant": variant}))
    played = Trajectory(TrajectoryId(0, 0), 0, "t", 0, (), Sampling(), EndReason.DONE, result)
    return reward.score(played, Task("t", ()), ScoreContext(0, [text]))


def test_the_variants_differ_where_the_original_is_wrong() -> None:
    press = "Action: press(key='enter')"
    assert score("corrected", 1.0, press) == Scored(1.0, {"success": 1.0, "format": 0.0})
    assert score("original", 1.0, press) == Scored(
        0.5, {"success": 1.0, "format": -1.0}, ("unparsable", "UnboundLocalError")
    )
    tokens = "Action: click(start_box='<|box_start|>(1,2)<|box_end|>')"
    assert score("original", 0.0, tokens) == Scored(
        -0.5, {"success": 0.0, "format": -1.0}, ("unparsable", "ValueError")
    )
    assert score("corrected", 0.0, tokens) == Scored(0.0, {"success": 0.0, "format": 0.0})
    assert score("original", None, "Action: wait()") == Scored(
        0.0, {"success": 0.0, "format": 0.0}, ("no_result",)
    )


@pytest.mark.parametrize(
    ("text", "thought"),
    [
        ("Thought: go\nAction: scroll()", "go"),
        ("Thought: Action: scroll()", "Action: scroll()"),
        ("Reflection: no\nAction_Summary: yes \n Action: scroll()", "yes"),
        ("Action_Summary: sum Action: scroll()", "sum"),
        ("Action: scroll()", None),
        ("Reflection: alone\nAction: scroll()", None),
        ("Thought:" + " \n" * 300_000 + "Action: scroll()", ""),
    ],
)
def test_the_thought_is_what_stands_before_the_action(text: str, thought: str | None) -> None:
    """The last turn needed minutes where a pattern tried each blank."""
    [call] = parsed(text)
    assert f"Thought:\n{thought}\n'''" in call.code


@pytest.mark.parametrize("name", ["type", "finished"])
@pytest.mark.parametrize("tail", ["", "\n')", "\n" * 9 + "')"])
def test_calls_that_are_never_closed_take_time_that_grows_with_the_text(
    name: str, tail: str
) -> None:
    began = time.thread_time()
    with suppress(Broken):
        parsed("Thought: t\nAction: " + f"{name}(content='" * 20_000 + tail)
    assert time.thread_time() - began < 5


PIECES = [
    "type(content='",
    "finished(content='",
    "')",
    "'",
    "\n",
    "type(content=",
    "type",
    "\\'",
    ")",
    "a",
    "\r",
]


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_quotes_are_escaped_as_the_originals_pattern_does(call: str) -> None:
    name = next((name for name in ("type", "finished") if f"{name}(content" in call), None)
    bare = re.sub(rf"{name}\(content='(.*?)'\)", r"\1", call)
    escaped = re.sub(r"(?<!\\)'", r"\\'", bare)
    assert repaired(call) == (call if name is None else f"{name}(content='{escaped}')")
