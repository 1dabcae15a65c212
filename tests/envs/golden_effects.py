"""What a golden turn must do to a screen, from the actions that its file names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rayloop.envs.grammar.actions import (
    Action,
    Actions,
    Answer,
    CallUser,
    Click,
    Drag,
    Finish,
    HoldKey,
    Hotkey,
    Hover,
    LongPress,
    Mark,
    MouseButton,
    Point,
    Screenshot,
    Scroll,
    Sleep,
    Swipe,
    Type,
)
from rayloop.envs.grammar.language import action_format
from rayloop.envs.grammar.rules import Extent
from tools.pages.compatible.golden_turns import SCREENS, THOUSAND, GoldenTurn

FORMER_TEXT = "former#"
"""What a field holds before a turn that clears it: a text that no golden turn types."""

Event = tuple[Any, ...]
WHEEL = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}
UNRESIZED = ("android_world", "openai_computer", "anthropic_computer")
"""Languages whose coordinates are pixels of the screen itself."""
KEYS = {
    "ctrl": ("Control", "Control_L"),
    "shift": ("Shift", "Shift_L"),
    "alt": ("Alt", "Alt_L"),
    "enter": ("Enter", "Return"),
    "tab": ("Tab", "Tab"),
    "down": ("ArrowDown", "Down"),
    "pagedown": ("PageDown", "Next"),
    "f11": ("F11", "F11"),
}
"""The grammar's names of keys -> those of DOM and of X."""
FACTOR = 28
USUAL_SWIPE = 0.5
MIDDLE = 0.5
PAUSE_S = 0.3
"""The longest wait of a turn here; the turns ask for up to ten seconds."""
USUAL_SCROLLS = {"webgym": (0.94, "fraction"), "gui_owl": (400, "pixels")}
"""How far a scroll goes in the programs of a family's makers; UI-TARS' goes five notches."""


@dataclass(frozen=True)
class Screen:
    """Size in pixels."""

    width: int
    height: int
    wheel_pixels: int = 2
    """The least distance of the wheel."""


LARGE = Screen(1500, 1850)
"""Not a multiple of 28, so that points of resized screens are rescaled."""
SMALL = Screen(640, 480)


def unit(family: str, screen: Screen) -> tuple[float, float]:
    """The largest coordinates of a family's points on a screen."""
    extent = SCREENS.get(family, THOUSAND)
    if extent.columns <= THOUSAND.columns:
        return extent.columns, extent.rows
    if family in UNRESIZED:
        return screen.width, screen.height
    return tuple(round(side / FACTOR) * FACTOR for side in (screen.width, screen.height))  # type: ignore[return-value]


def screen_of(family: str) -> Screen:
    """Points of absolute languages need a large screen."""
    columns, _ = unit(family, LARGE)
    return LARGE if columns > 1000 else SMALL


class Effects:
    """The events that actions cause, with places in pixels.

    ``pointer`` is where the pointer was left. ``held`` are keys and buttons that stay down.
    """

    def __init__(self, turn: GoldenTurn, screen: Screen, pointer: Point) -> None:
        self.family = turn.family
        self.screen = screen
        self.pointer = pointer
        self.places: list[Point] = []
        self.typed: list[str] = []
        self.clears = False
        self.seconds = 0.0
        self.wheel = [0.0, 0.0]
        self.ends = False
        self.events = list(self._all(turn.actions))

    def _all(self, actions: Sequence[Action]) -> Iterator[Event]:
        for action in actions:
            if isinstance(action, Finish | CallUser):
                self.ends = True
                return
            keys = getattr(action, "keys", ()) if not isinstance(action, Hotkey) else ()
            yield from (("key", key, True) for key in keys)
            yield from self._of(action)
            yield from (("key", key, False) for key in reversed(keys))

    def _of(self, action: Action) -> Iterator[Event]:
        match action:
            case Click(at, button, times):
                self._go(at)
                yield from [self._button("down", button), self._button("up", button)] * times
            case Hover(at):
                self._go(at)
            case LongPress(at, seconds):
                self._go(at)
                self.seconds += seconds or 0
                yield self._button("down", "left")
                yield self._button("up", "left")
            case Drag(start, end, path):
                self._go(start)
                yield self._button("down", "left")
                for place in (*path, end):
                    self._go(place)
                yield self._button("up", "left")
            case MouseButton(down):
                yield self._button("down" if down else "up", "left")
            case Hotkey(keys):
                yield from (("key", key, True) for key in keys)
                yield from (("key", key, False) for key in reversed(keys))
            case HoldKey(key, _, seconds) if seconds is not None:
                self.seconds += seconds
                yield from (("key", key, True), ("key", key, False))
            case HoldKey(key, down):
                yield ("key", key, down)
            case Type(text, clear):
                self.typed.append(text)
                self.clears = clear
            case Sleep(seconds):
                self.seconds += seconds or 0
            case Scroll(direction, at, amount, kind):
                self._go(at)
                if amount is None:
                    amount, kind = USUAL_SCROLLS.get(self.family, (5, "notches"))
                side = self.screen.height if direction in ("up", "down") else self.screen.width
                pixels = {"notches": 100, "pixels": 1, "fraction": side}[kind]
                self._turn(direction, amount * pixels)
            case Swipe():
                self._swipe(action)
            case Screenshot() | Answer():
                pass
            case other:
                raise AssertionError(f"nobody said what {other} does")

    def _swipe(self, swipe: Swipe) -> None:
        columns, rows = unit(self.family, self.screen)
        start = swipe.start or Point(columns / 2, rows / 2)
        self._go(start)
        direction, amount = swipe.direction, swipe.amount
        if swipe.end is not None:
            across = (swipe.end.x - start.x) / columns
            down = (swipe.end.y - start.y) / rows
            direction = "down" if down > 0 else "up"
            if abs(across) > abs(down):
                direction = "right" if across > 0 else "left"
            amount = max(abs(across), abs(down))
        assert direction is not None
        part = USUAL_SWIPE if amount is None else amount
        side = self.screen.height if direction in ("up", "down") else self.screen.width
        self._turn(OPPOSITE[direction], part * side)

    def _turn(self, direction: str, pixels: float) -> None:
        distance = min(max(pixels, 100), 5000)
        right, down = WHEEL[direction]
        self.wheel[0] += right * distance
        self.wheel[1] += down * distance

    def _go(self, place: Point | Mark | None) -> None:
        if place is None:
            return
        assert isinstance(place, Point)
        columns, rows = unit(self.family, self.screen)
        x = min(max(place.x * self.screen.width / columns, 0), self.screen.width - 1)
        y = min(max(place.y * self.screen.height / rows, 0), self.screen.height - 1)
        self.pointer = Point(x, y)
        self.places.append(self.pointer)

    def _button(self, kind: str, button: str) -> Event:
        return (kind, button, self.pointer.x, self.pointer.y)


def near(first: Event, second: Event) -> bool:
    """Whether two events are the same, with places at most one pixel apart."""
    pairs = list(zip(first, second, strict=False))
    return len(first) == len(second) and all(
        abs(a - b) <= 1 if isinstance(a, float | int) and not isinstance(a, bool) else a == b
        for a, b in pairs
    )


def assert_seen(
    expected: Effects, seen: Sequence[Event], text: str, wheel: Sequence[float]
) -> None:
    """The screen got what the turn means: buttons, keys, text, wheel, and places of the pointer."""
    moves = [event[-2:] for event in seen if event[0] in ("move", "down", "up", "wheel")]
    for place in expected.places:
        assert any(near((place.x, place.y), move) for move in moves), (place, seen)
    events = [event for event in seen if event[0] in ("down", "up", "key")]
    if expected.typed:
        # A turn may also press keys that write, such as Enter.
        assert all(part in text for part in expected.typed), (expected.typed, text)
        assert not (expected.clears and FORMER_TEXT in text), text
        # The typed characters are keys, too.
        remaining = iter(events)
        for event in expected.events:
            assert any(near(event, other) for other in remaining), (event, seen)
    else:
        assert len(events) == len(expected.events), (expected.events, events)
        for event, other in zip(expected.events, events, strict=True):
            assert near(event, other), (event, other)
    for meant, turned in zip(expected.wheel, wheel, strict=True):
        assert abs(meant - turned) <= expected.screen.wheel_pixels / 2, (expected.wheel, wheel)


def key_names(events: list[Event], place: int) -> list[Event]:
    """Expected events with the screen's names of keys."""
    names = {ours: theirs[place] for ours, theirs in KEYS.items()}
    return [
        ("key", names.get(event[1], event[1]), event[2]) if event[0] == "key" else event
        for event in events
    ]


def preparing(turn: GoldenTurn, columns: float, rows: float) -> list[Action]:
    """What comes before a turn: the pointer is in the middle, and what it lets go is held."""
    actions: list[Action] = [Hover(Point(columns * MIDDLE, rows * MIDDLE))]
    match turn.actions[:1]:
        case [MouseButton(False)]:
            actions.append(MouseButton(True))
        case [HoldKey(key, False, None)]:
            actions.append(HoldKey(key))
    return actions


def released(turn: GoldenTurn) -> list[Action]:
    """What lets go all that a turn leaves held."""
    actions: list[Action] = []
    for action in turn.actions:
        match action:
            case MouseButton(True):
                actions.append(MouseButton(False))
            case HoldKey(key, True, None):
                actions.append(HoldKey(key, down=False))
    return actions


def assert_written_equal(turn: GoldenTurn, extent: Extent) -> None:
    language = action_format(turn.family)
    found = language.read(turn.text, extent)
    assert isinstance(found, Actions), found
    if "one_way" not in turn.others:
        assert language.read(language.write(found, extent), extent) == found
