"""Actions made of simpler ones, which every screen can carry out."""

from dataclasses import dataclass, replace
from typing import Any

from rayloop.envs.grammar.actions import (
    Action,
    Answer,
    Click,
    Direction,
    Drag,
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
    Unsupported,
)

MAX_PAUSE_S = 10.0
"""Seconds of a wait, of a key or of a finger that stays down; a longer one is cut."""
MAX_TYPED_CHARACTERS = 4_000
"""Characters that one action may type."""
CHARACTER_TIMEOUT_S = 0.05
"""Seconds that typing a character may take before the screen counts as lost.

It takes one or two milliseconds.
"""
MAX_NOTCHES = 50.0
"""Notches of a scroll; a longer one is cut."""
USUAL_NOTCHES = 5.0
"""Notches of a scroll that does not say how far, in a language that does not say it either.

UI-TARS turns a computer's wheel by 5 (codes/ui_tars/action_parser.py) and its browser's by 500
pixels (UI-TARS-desktop, browser-operator.ts). GLM-V's scroll has 5 steps by default (agent.md).
"""
NOTCH_PIXELS = 100.0
"""Pixels that a page moves for a notch of the wheel."""
SWIPE_AMOUNT = 0.5
"""The part of the screen that a finger goes when a swipe has only a direction.

AndroidWorld's scroll goes from the middle of the screen to its edge (actuation.py).
"""
USUAL_AMOUNTS = {
    "notches": USUAL_NOTCHES,
    "pixels": USUAL_NOTCHES * NOTCH_PIXELS,
    "fraction": SWIPE_AMOUNT,
}
"""How far a scroll goes that does not say it, by unit, for languages that must say it."""
SCREEN_NOTCHES = 8.0
"""Notches of a wheel that move the content as a finger does that goes over a whole screen."""
MIN_SWIPE_AMOUNT = 0.05
"""The shortest way of a finger, as a part of the screen: less would be a tap."""
MAX_SWIPE_AMOUNT = 0.8
"""The longest way of a finger, as a part of the screen."""
_OPPOSITE: dict[Direction, Direction] = {
    "up": "down",
    "down": "up",
    "left": "right",
    "right": "left",
}


def notches(scroll: Scroll, width: int, height: int) -> float:
    """Return how many notches the wheel turns on a screen of this size in pixels, at least 1."""
    if scroll.amount is None:
        return USUAL_NOTCHES
    screen = height if scroll.direction in ("up", "down") else width
    pixels_per_unit = {"notches": NOTCH_PIXELS, "pixels": 1.0, "fraction": float(screen)}
    count = scroll.amount * pixels_per_unit[scroll.unit] / NOTCH_PIXELS
    return min(max(count, 1.0), MAX_NOTCHES)


@dataclass
class BasicActions:
    """Makes basic actions of a turn's; ``pointer`` is where the pointer was left.

    ``columns`` and ``rows`` are the size of the screen in the unit of the points. The results are
    Click, Hover and Drag with places, LongPress, Scroll, MouseButton, Hotkey, HoldKey, Type,
    SelectOption, Sleep and what only some screens have; keys that are held down are separate
    actions. On a ``touch`` screen a Swipe with both ends takes the place of Scroll.
    """

    columns: float
    rows: float
    pointer: Point | None = None
    touch: bool = False

    def of(self, action: Action) -> tuple[Action, ...]:
        """Return the actions that one stands for. Raises ValueError in words for the policy."""
        if isinstance(action, Unsupported):
            raise ValueError(f"this screen has no {action.name}")
        if isinstance(getattr(action, "at", None), Mark):
            raise ValueError("the elements of this screen have no marks: give a point")
        if isinstance(action, Type) and len(action.text) > MAX_TYPED_CHARACTERS:
            count = len(action.text)
            raise ValueError(
                f"one action types at most {MAX_TYPED_CHARACTERS} characters, not {count}"
            )
        results = self._parts(action)
        for result in results:
            place = getattr(result, "end", getattr(result, "at", None))
            if isinstance(place, Point):
                self.pointer = place
        return results

    def _parts(self, action: Action) -> tuple[Action, ...]:
        match action:
            case Screenshot() | Answer():
                return ()
            case Swipe() | Scroll() if self.touch:
                return (self._swiped(action),)
            case Swipe():
                return (self._scrolled(action),)
            case Drag(start, end, path) if path:
                moves = map(Hover, (*path, end))
                first = Hover(start or self._pointer())
                inner = (first, MouseButton(True), *moves, MouseButton(False))
                return _holding(action.keys, *inner)
            case Drag(None, _):
                return _holding(action.keys, replace(action, start=self._pointer(), keys=()))
            case Click(None):
                return _holding(action.keys, replace(action, at=self._pointer(), keys=()))
            case Click() | Hover() | Drag() | Scroll():
                return _holding(action.keys, replace(action, keys=()))
            case HoldKey(key, _, seconds) if seconds is not None:
                return HoldKey(key), Sleep(_limited(seconds)), HoldKey(key, down=False)
            case Sleep(seconds) | LongPress(_, seconds) if seconds is not None:
                return (replace(action, seconds=_limited(seconds)),)
            case Type(text, True):
                # An empty text is a field that is emptied.
                last: Action = Type(text) if text else Hotkey(("delete",))
                return Hotkey(("ctrl", "a")), last
        return (action,)

    def _pointer(self) -> Point:
        if self.pointer is None:
            raise ValueError("the pointer was not moved yet: give a place")
        return self.pointer

    def _swiped(self, action: Swipe | Scroll) -> Swipe:
        """Return the way of a finger, with both ends on the screen."""
        if isinstance(action, Scroll):
            is_vertical = action.direction in ("up", "down")
            screen = self.rows if is_vertical else self.columns
            per_screen = {"notches": SCREEN_NOTCHES, "pixels": screen, "fraction": 1.0}
            amount = action.amount and action.amount / per_screen[action.unit]
            place = action.at if isinstance(action.at, Point) else None
            # The content follows the finger.
            return self._swiped(Swipe(place, None, _OPPOSITE[action.direction], amount))
        start = action.start or Point(self.columns / 2, self.rows / 2)
        if action.end is not None:
            return replace(action, start=start)
        if action.direction is None:
            raise ValueError("a swipe needs a direction, or where it ends")
        part = min(max(action.amount or SWIPE_AMOUNT, MIN_SWIPE_AMOUNT), MAX_SWIPE_AMOUNT)
        if action.direction in ("up", "left"):
            part = -part
        if action.direction in ("up", "down"):
            first, last = _ends(start.y, part, self.rows)
            return Swipe(Point(start.x, first), Point(start.x, last))
        first, last = _ends(start.x, part, self.columns)
        return Swipe(Point(first, start.y), Point(last, start.y))

    def _scrolled(self, swipe: Swipe) -> Scroll:
        """Return the turn of a wheel that moves the content as the finger would."""
        start = swipe.start or Point(self.columns / 2, self.rows / 2)
        if swipe.end is None:
            direction = swipe.direction
            amount = SWIPE_AMOUNT if swipe.amount is None else swipe.amount
        else:
            across = (swipe.end.x - start.x) / self.columns
            down = (swipe.end.y - start.y) / self.rows
            direction = "down" if down > 0 else "up"
            if abs(across) > abs(down):
                direction = "right" if across > 0 else "left"
            amount = max(abs(across), abs(down))
        if direction is None:
            raise ValueError("a swipe needs a direction, or where it ends")
        return Scroll(_OPPOSITE[direction], start, amount, "fraction")


def _ends(start: float, part: float, length: float) -> tuple[float, float]:
    """Return the ends of a way on the screen, nine tenths of which a finger uses."""
    way = part * length
    lowest = length / 20 - min(way, 0)
    highest = length - length / 20 - max(way, 0)
    first = min(max(start, lowest), highest)
    return first, first + way


def _limited(seconds: float) -> float:
    return min(max(seconds, 0.0), MAX_PAUSE_S)


def _holding(keys: tuple[str, ...], *inner: Any) -> tuple[Action, ...]:
    """Return actions during which keys are down."""
    presses = (HoldKey(key) for key in keys)
    releases = (HoldKey(key, down=False) for key in reversed(keys))
    return *presses, *inner, *releases
