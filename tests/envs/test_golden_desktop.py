"""Every golden turn of every language is carried out on a desktop: a window over the whole screen
gets the buttons, keys, places, texts and turns of the wheel that the turn means.

A turn with an action that a desktop lacks is refused at that action, as the table of
docs/compatibility.md counts it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rayloop.core.protocols import StepResult
from rayloop.envs.desktop.environment import DesktopTasks
from rayloop.envs.desktop.session import Desktop, DesktopLimits, missing
from rayloop.envs.grammar import basic
from rayloop.envs.grammar.actions import Action, Hotkey, Point
from tests.envs.golden_effects import (
    FORMER_TEXT,
    LARGE,
    MIDDLE,
    PAUSE_S,
    SMALL,
    Effects,
    Event,
    Screen,
    assert_seen,
    key_names,
    preparing,
    released,
    screen_of,
    unit,
)
from tests.support.runs import eventually
from tools.pages.compatible.golden_turns import FAMILIES, GoldenTurn, golden_turns
from tools.pages.compatible.languages import NOT_ON_A_DESKTOP, counted, first_lacking, is_read

LACKS = missing()
pytestmark = [
    pytest.mark.env,
    pytest.mark.skipif(bool(LACKS), reason=f"missing here: {LACKS}"),
]
LISTENER = (Path(__file__).parent / "listener.py").read_bytes()
LAST_KEY = ("key", "F9", False, "")
"""No golden turn presses it: when it has arrived, all before it has."""
FIRST_KEY = "F8"
"""Pressed until it arrives; no golden turn presses it either."""
NOTCH_PIXELS = 100


class Listening:
    """A desktop whose whole screen is a window that writes down what it gets."""

    def __init__(self, screen: Screen) -> None:
        self.screen = dataclasses.replace(screen, wheel_pixels=NOTCH_PIXELS)
        self.desktop = Desktop(DesktopLimits(width=screen.width, height=screen.height))
        self.desktop.put("listener.py", LISTENER)
        self.desktop.launch([os.path.realpath(sys.executable), "-S", "listener.py", "log"])
        self._read_bytes = 0
        eventually(self._hears_keys, "a key arrives", 60, 0.5)

    def _hears_keys(self) -> bool:
        """Press a key, which arrives once the window has the keyboard."""
        self.desktop.ask("press", keys=[FIRST_KEY.lower()])
        log = self.desktop.home().get("log")
        content = (log.content if log else None) or b""
        self._read_bytes = len(content)
        return FIRST_KEY.encode() in content and content.endswith(b"\n")

    def environment(self, family: str) -> DesktopTasks:
        """An episode on the desktop, in a language."""
        waits = dict.fromkeys(("pause", "react", "settle", "type_delay"), 0.0)
        settings = DesktopTasks.Settings.model_validate(
            {
                "limits": {"width": self.screen.width, "height": self.screen.height},
                "language": family,
                "pointing": {"max_pixels": 4_000_000},
                "wait": PAUSE_S,
                **waits,
            }
        )
        environment = DesktopTasks(settings)
        environment._desktop = self.desktop
        return environment

    def seen(self) -> list[Event]:
        """What it got since this was last asked."""
        self.desktop.ask("press", keys=["f9"])

        def all_lines() -> list[Event] | None:
            content = self.desktop.home()["log"].content or b""
            complete, _, _ = content[self._read_bytes :].rpartition(b"\n")
            lines = [tuple(json.loads(line)) for line in complete.splitlines()]
            if LAST_KEY not in lines:
                return None
            self._read_bytes += len(complete) + 1
            return lines

        lines: list[Event] = eventually(all_lines, "the last key", 30)
        return [line for line in lines if line[1] not in (FIRST_KEY, LAST_KEY[1])]


@pytest.fixture(autouse=True, scope="module")
def _short_waits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(basic, "MAX_PAUSE_S", PAUSE_S)
        yield


@pytest.fixture(scope="module")
def desktops() -> Iterator[dict[Screen, Listening]]:
    """A small and a large one."""
    started: dict[Screen, Listening] = {}
    try:
        for screen in (SMALL, LARGE):
            started[screen] = Listening(screen)
        yield started
    finally:
        for listening in started.values():
            listening.desktop.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_desktop_does_what_the_turns_mean(desktops: dict[Screen, Listening], family: str) -> None:
    listening = desktops[screen_of(family)]
    environment = listening.environment(family)
    *_, of_the_table = counted(family)
    turns = golden_turns(family)
    assert sum(on_desktop(environment, listening, turn) for turn in turns) == of_the_table


def act(environment: DesktopTasks, actions: Sequence[Action]) -> None:
    """Carry out actions, without a look at the screen."""
    for action in actions:
        for part in environment.basic(action):
            environment._act(part)


def on_desktop(environment: DesktopTasks, listening: Listening, turn: GoldenTurn) -> bool:
    """Carry out a turn, and look at what the window got. Returns whether it was carried out."""
    screen = listening.screen
    act(environment, preparing(turn, *unit(turn.family, screen)))
    listening.seen()
    start_time = time.monotonic()
    step = environment.step(turn.text)
    seconds = time.monotonic() - start_time
    events = listening.seen()
    lacking = first_lacking(turn, NOT_ON_A_DESKTOP) if is_read(turn) else 0
    assert_error(step, turn, is_refused=lacking is not None)
    done_turn = dataclasses.replace(turn, actions=turn.actions[:lacking])
    middle = Point(screen.width * MIDDLE, screen.height * MIDDLE)
    expected = Effects(done_turn, screen, middle)
    expected.events = key_names(expected.events, 1)
    turned, others = wheel(events)
    plain = [event[:3] if event[0] == "key" else event for event in others]
    assert_seen(expected, plain, field(events), turned)
    assert step.done == expected.ends, turn
    assert seconds >= min(expected.seconds, PAUSE_S)
    act(environment, released(done_turn))
    return lacking is None


def assert_error(step: StepResult, turn: GoldenTurn, is_refused: bool) -> None:
    """A turn that is refused is an error that the policy sees, and no other is."""
    if not is_refused:
        assert step.error is None, (turn, step.error)
        return
    assert step.error, turn
    assert step.observation is not None
    assert step.observation.messages[0].parts[0] == f"Error: {step.error}"


def wheel(events: list[Event]) -> tuple[list[float], list[Event]]:
    """How far it was turned in pixels of a browser, and the other events."""
    turned = [0.0, 0.0]
    others: list[Event] = []
    for event in events:
        if event[0] not in ("down", "up") or not event[1].startswith("wheel"):
            others.append(event)
        elif event[0] == "down":
            axis = 0 if event[1] in ("wheel left", "wheel right") else 1
            is_forward = event[1] in ("wheel down", "wheel right")
            turned[axis] += NOTCH_PIXELS if is_forward else -NOTCH_PIXELS
    return turned, others


def field(events: list[Event]) -> str:
    """What the keys make of a field with a former text: Control and A mark all of it."""
    text = FORMER_TEXT
    is_marked = control = False
    for kind, name, down, *written in events:
        if kind != "key":
            continue
        if name == "Control_L":
            control = down
        elif control:
            is_marked = is_marked or name == "a"
        elif down and (written[0] or name == "Delete"):
            text = written[0] if is_marked else text + written[0]
            is_marked = False
    return text


@pytest.mark.parametrize("key", ["?", "+", "a", "~", "5"])
def test_a_key_writes_its_own_character(desktops: dict[Screen, Listening], key: str) -> None:
    listening = desktops[SMALL]
    environment = listening.environment("ui_tars")
    listening.seen()
    act(environment, [Hotkey((key,))])
    assert field(listening.seen()) == FORMER_TEXT + key
