"""Carries out what a policy's turn asks for, on a desktop."""

from __future__ import annotations

import time

from rayloop.envs.desktop.session import Desktop
from rayloop.envs.grammar.actions import Action, Click, Drag, HoldKey, Hotkey, Hover, Scroll, Type, Wait
from rayloop.envs.grammar.pointing import Pointing

TICKS = 5
"""Steps of the wheel for one scroll, as in UI-TARS."""
LONGEST = 4_000
"""Characters that one action may type."""
PER_CHARACTER = 0.05
"""Seconds that typing one may take before the desktop counts as lost; it takes one or two milliseconds."""


class Hands:
    """``wait``: seconds of a wait; ``delay``: seconds after each character."""

    def __init__(self, desktop: Desktop, pointing: Pointing, size: tuple[int, int], wait: float, delay: float) -> None:
        self._desktop, self._pointing, self._size = desktop, pointing, size
        self._wait, self._delay = wait, delay

    def carry_out(self, action: Action) -> None:
        """Raises ValueError for what a desktop cannot do, in words for the policy, and DesktopLost."""
        ask = self._desktop.ask
        match self._pointing.on(action, *self._size):
            case Click(at, button, times):
                ask("click", x=int(at.x), y=int(at.y), button=button, count=times)
            case Hover(at):
                ask("move", x=int(at.x), y=int(at.y))
            case Drag(start, end):
                ask("drag", x=int(start.x), y=int(start.y), to_x=int(end.x), to_y=int(end.y))
            case Scroll(direction, at):
                if at is not None:
                    ask("move", x=int(at.x), y=int(at.y))
                ask("scroll", direction=direction, ticks=TICKS)
            case Hotkey(keys):
                ask("press", keys=list(keys))
            case HoldKey(key, down):
                ask("hold", key=key, down=down)
            case Type(text):
                if len(text) > LONGEST:
                    raise ValueError(f"one action types at most {LONGEST} characters, not {len(text)}")
                self._desktop.type(text, self._delay, PER_CHARACTER)
            case Wait():
                time.sleep(self._wait)
            case other:
                raise ValueError(f"a desktop has no {type(other).__name__}: it is an action of touch screens")
