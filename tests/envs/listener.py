"""A window over the whole screen of a desktop that writes down what it gets.

    python listener.py FILE

Each line is JSON: ``["down" | "up", button, x, y]``, ``["move", x, y]``, or
``["key", name, down, character]`` with X's name of the key, and what it writes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from Xlib import XK, X
from Xlib.display import Display

BUTTONS = {1: "left", 2: "middle", 3: "right", 4: "wheel up", 5: "wheel down", 6: "wheel left"}
BUTTONS |= {7: "wheel right", 8: "back", 9: "forward"}
POINTER_EVENTS = X.ButtonPressMask | X.ButtonReleaseMask | X.PointerMotionMask
KEY_EVENTS = X.KeyPressMask | X.KeyReleaseMask
SYMBOLS = {name[3:]: value for name, value in vars(XK).items() if name.startswith("XK_")}
NAMES = {value: name for name, value in reversed(SYMBOLS.items())}
"""A symbol with several names, such as F11 and L1, has the first one."""
CONTROL = {"Return": "\n", "Tab": "\t"}
UNICODE = 0x01000000
"""A symbol from here on is a character."""


def character(symbol: int) -> str:
    """What a symbol writes; empty for a key that writes nothing."""
    if symbol > UNICODE:
        return chr(symbol - UNICODE)
    if 0x20 <= symbol <= 0xFF:
        return chr(symbol)
    return CONTROL.get(NAMES.get(symbol, ""), "")


def key(display: Any, event: Any) -> list[object]:
    """The line of a key: its name is that without shift."""
    symbol = display.keycode_to_keysym(event.detail, 0)
    shifted = display.keycode_to_keysym(event.detail, 1)
    name = character(symbol).strip() or NAMES.get(symbol, str(symbol))
    written = character(shifted if event.state & X.ShiftMask else symbol)
    return ["key", name, event.type == X.KeyPress, written]


def line(display: Any, event: Any) -> list[object]:
    """The line of an event; empty for one that does not count."""
    if event.type in (X.ButtonPress, X.ButtonRelease):
        kind = "down" if event.type == X.ButtonPress else "up"
        return [kind, BUTTONS[event.detail], event.root_x, event.root_y]
    if event.type in (X.KeyPress, X.KeyRelease):
        return key(display, event)
    if event.type == X.MotionNotify:
        return ["move", event.root_x, event.root_y]
    return []


def window_of(display: Any, side: int, **attributes: Any) -> Any:
    """A shown window in the upper left corner; ``side`` 0 means the whole screen."""
    root = display.screen().root
    size = root.get_geometry()
    window = root.create_window(
        0,
        0,
        side or size.width,
        side or size.height,
        0,
        X.CopyFromParent,
        background_pixel=0,
        **attributes,
    )
    window.map()
    return window


def main() -> None:
    display = Display()
    # The desktop waits until the window manager has given the keyboard to a window. Clicks in such
    # a window are held back, and keys would overtake them: another window, which is not managed,
    # takes its place at the first key.
    window_of(display, side=1, event_mask=X.KeyPressMask)
    while display.next_event().type != X.KeyPress:
        pass
    events = POINTER_EVENTS | KEY_EVENTS
    window = window_of(display, side=0, override_redirect=True, event_mask=events)
    display.sync()
    window.set_input_focus(X.RevertToParent, X.CurrentTime)
    display.flush()
    with open(sys.argv[1], "w", buffering=1, encoding="utf-8") as log:
        while True:
            event = display.next_event()
            if event.type == X.MappingNotify:
                display.refresh_keyboard_mapping(event)
            elif found := line(display, event):
                log.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
