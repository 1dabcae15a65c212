"""The programs that OSWorld's machine runs for keys and texts.

What pyautogui makes of them: tests/adapters/test_pyautogui.py.
"""

from __future__ import annotations

import ast
import string
from typing import Any

import pytest

from rayloop.envs.grammar import calls
from rayloop.envs.grammar.actions import (
    Click,
    HoldKey,
    Hotkey,
    MouseButton,
    Point,
    Scroll,
    Sleep,
    Type,
)
from rayloop.envs.osworld.environment import code


def presses(program: str) -> list[tuple[str, list[Any]]]:
    """Method and arguments of each call of pyautogui."""
    lines = [line.value for line in ast.parse(program).body if isinstance(line, ast.Expr)]
    made = [
        line
        for line in lines
        if isinstance(line, ast.Call) and isinstance(line.func, ast.Attribute)
    ]
    return [
        (line.func.attr, [ast.literal_eval(one) for one in line.args])
        for line in made
        if isinstance(line.func, ast.Attribute)
    ]


@pytest.mark.parametrize(
    "text", ["a<b", "<", "<html></html>", "=IF(A1<5,1,0)", "x << 2", string.printable]
)
def test_pyautogui_never_writes_the_character_that_it_gets_wrong(text: str) -> None:
    typed = presses(code(Type(text)))
    assert all("<" not in arguments[0] for name, arguments in typed if name == "write")
    shown = "".join(arguments[0] if name == "write" else "<" for name, arguments in typed)
    assert shown == text
    assert [arguments for name, arguments in typed if name == "hotkey"] == [
        ["shift", ","]
    ] * text.count("<")


@pytest.mark.parametrize("key", sorted(calls.KEYS))
def test_no_key_of_the_grammar_reaches_pyautogui_under_a_name_that_it_gets_wrong(key: str) -> None:
    programs = [
        code(Hotkey((key,))),
        code(Hotkey(("ctrl", key))),
        code(HoldKey(key, True)),
        code(HoldKey(key, False)),
    ]
    names = [
        name for program in programs for _, arguments in presses(program) for name in arguments
    ]
    assert names
    assert not {"<", "meta"} & set(names)


def test_a_held_key_comes_up_in_the_reverse_order() -> None:
    assert presses(code(HoldKey("<", True))) == [("keyDown", ["shift"]), ("keyDown", [","])]
    assert presses(code(HoldKey("<", False))) == [("keyUp", [","]), ("keyUp", ["shift"])]


def test_amounts_buttons_and_seconds_reach_the_machine() -> None:
    at = Point(3, 4)
    assert code(Click(at, "middle", 3)).endswith(
        "click(3, 4, clicks=3, interval=0.05, button='middle')"
    )
    assert code(Scroll("down", at)).endswith("moveTo(3, 4); pyautogui.scroll(-5)")
    assert code(Scroll("down", at, 2)).endswith("moveTo(3, 4); pyautogui.scroll(-2)")
    assert code(Scroll("right", at, 540, "pixels")).endswith("pyautogui.hscroll(5)")
    assert code(Scroll("up", at, 0.5, "fraction"), height=800).endswith("pyautogui.scroll(4)")
    assert code(MouseButton(True)).endswith("mouseDown()")
    assert code(Sleep()) == "WAIT"
    assert code(Sleep(2.0)) == "import time; time.sleep(2.0)"
    with pytest.raises(ValueError, match="no Click"):
        code(Click(at, "back"))
