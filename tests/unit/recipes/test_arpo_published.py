"""Turns that ARPO's own worker read, and the episodes of ``variant: original``."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from rayloop.core.protocols import StepResult
from rayloop.core.types import ImageSource, Message, Task
from rayloop.envs.grammar.actions import (
    Action,
    CallUser,
    Click,
    Drag,
    Finish,
    Hotkey,
    Point,
    Scroll,
    Sleep,
    Type,
)
from rayloop.envs.grammar.arpo import Broken, acts
from rayloop.envs.grammar.screens import ScreenEnvironment, ScreenSettings
from tests.originals.test_arpo import EXPECTED, KEPT, ours, turns


def test_turns_are_read_as_arpos_worker_read_them() -> None:
    expected = json.loads(EXPECTED.read_text(encoding="utf-8"))
    assert [text for text, *_ in expected] == turns(1, KEPT)
    assert [(text, *ours(text)) for text, *_ in expected] == [
        (text, form, sent) for text, form, sent in expected
    ]
    assert {form for _, form, _ in expected} == {0.0, -1.0}


@pytest.mark.parametrize(
    ("calls", "done"),
    [
        ("click(start_box='(966,546)')", [(Click(Point(960, 540)),)]),
        ("left_double(start_box='(1,1)')", [(Click(Point(0, 0), times=2),)]),
        (
            "drag(start_box='(0,0)', end_box='(99999,546)')",
            [(Drag(Point(0, 0), Point(1919, 540)),)],
        ),
        ("scroll(direction='down')", [(Scroll("down"),)]),
        ("scroll(direction='left')\n\nhotkey(key='ctrl c')", [(), (Hotkey(("ctrl", "c")),)]),
        ("hotkey(key='ctrl+c')", [()]),
        ("hotkey(key='cmd a')", [(Hotkey(("a",)),)]),
        ("type(content='it\\'s\\n')", [(Type("it's"), Hotkey(("enter",)))]),
        ("type(content='a\\nb')", [()]),
        ("type(content='é x')", [(Type(" x"),)]),
        ("nonsense()", [()]),
        ("hotkey(key='a')\n\nwait()\n\nclick()", [(Sleep(),)]),
        ("hotkey(key='a')\n\nfinished(content='x')", [(Finish(),)]),
        ("call_user()", [(CallUser(),)]),
        ("error_env()", [(CallUser(),)]),
    ],
)
def test_what_a_turn_does(calls: str, done: list[tuple[Action, ...]]) -> None:
    assert acts(f"Thought: t\nAction: {calls}") == done


@pytest.mark.parametrize("thought", ["'''", "'''\nimport os\nos.system('id')\n'''", "\\"])
def test_a_thought_that_becomes_code_is_never_run(thought: str) -> None:
    assert acts(f"Thought: {thought}\nAction: hotkey(key='a')") in ([()], [(Hotkey(("a",)),)])
    with pytest.raises(Broken, match="UnboundLocalError"):
        acts(f"Thought: {thought}\nAction: press(key='a')")


@pytest.mark.parametrize(
    "call",
    [
        "click('a', 'b')",
        "click()",
        "click(1e999, 1)",
        "write(5)",
        "hotkey(5)",
        "scroll('x', x=1)",
        "moveTo(*[1, 2])",
        "keyDown()",
    ],
)
def test_code_that_a_text_smuggles_in_is_nothing_at_worst(call: str) -> None:
    assert acts(f"Thought: '''\npyautogui.{call}\n'''\nAction: hotkey(key='a')") == [()]
    typed = acts(
        rf"Thought: t\nAction: type(content='\\\\'); pyautogui.{call} #')".replace(r"\n", "\n")
    )
    assert all(isinstance(one, Type) for call in typed for one in call)


class Recorded(ScreenEnvironment):
    """A screen of 1920x1080 that keeps what is done on it."""

    def __init__(self, settings: ScreenSettings) -> None:
        super().__init__(settings)
        self.done: list[Action] = []

    def screen_size(self) -> tuple[int, int]:
        return 1920, 1080

    def _carry_out(self, actions: Sequence[Action]) -> StepResult:
        self.done += [self._screen.pointing.on(action, *self.screen_size()) for action in actions]
        return StepResult(
            self._shown(ImageSource(data=b"")),
            done=any(isinstance(one, Finish | CallUser) for one in actions),
        )


def screen(**settings: object) -> Recorded:
    pointing = {"min_pixels": 3136, "max_pixels": 2_116_800}
    return Recorded(
        ScreenSettings.model_validate({"variant": "original", "pointing": pointing, **settings})
    )


def test_an_episode_by_arpos_rules() -> None:
    made = screen(most_actions=4)
    shown = made._first(
        Task("t", (Message("system", ("s",)), Message("user", ("Do {instruction}",)))),
        "it",
        "SCREEN",
    )
    assert [(message.role, message.parts) for message in shown.messages] == [
        ("system", ("s",)),
        ("user", ("Do it",)),
        ("user", ("SCREEN",)),
    ]
    step = made.step("Action: click(start_box='(1931,1091)')\n\nscroll(direction='right')")
    assert (step.done, made.done) == (False, [Click(Point(1919, 1079))])
    assert not made.step("Action: nonsense()").done
    assert made.done[1:] == [Sleep()], "what does nothing still shows the screen"
    assert made.step("Action: hotkey(key='a')").done, "it was the fourth action"


def test_no_more_actions_are_carried_out_than_an_episode_has() -> None:
    made = screen(most_actions=4)
    assert not made.step("Action: hotkey(key='a')").done
    assert made.step("Action: " + "\n\n".join(["hotkey(key='b')", "nonsense()"] * 50)).done
    assert made.done == [
        Hotkey(("a",)),
        Hotkey(("b",)),
        Hotkey(("b",)),
    ], "a call that does nothing counts"


def test_a_turn_that_is_none_ends_the_episode_whatever_the_run_does_after_errors() -> None:
    step = screen().step("I would rather not.")
    assert (step.done, step.error) == (True, "this is not a turn: AssertionError")
    assert screen(variant="corrected").step("I would rather not.").done is False
