"""A window over the whole screen that writes down what it gets, for the desktop's tests.

    python listener.py FILE

Each line is JSON: ``["down" | "up", button, x, y]``, ``["move", x, y]``, ``["key", name, down]``,
with places on the screen and the keyboard's own names.
"""

from __future__ import annotations

import json
import sys

from Xlib import XK, X
from Xlib.display import Display

BUTTONS = {1: "left", 2: "middle", 3: "right", 4: "wheel up", 5: "wheel down", 6: "wheel left"}
BUTTONS |= {7: "wheel right", 8: "back", 9: "forward"}
EVENTS = X.ButtonPressMask | X.ButtonReleaseMask | X.PointerMotionMask
NAMES = {value: name[3:] for name, value in vars(XK).items() if name.startswith("XK_")}


def key_name(display: Display, event: object) -> str:
    """A character, or the name of another key."""
    code, state = event.detail, event.state  # type: ignore[attr-defined]
    symbol = display.keycode_to_keysym(code, 1 if state & X.ShiftMask else 0)
    if symbol >= 0x01000000:
        return chr(symbol - 0x01000000)
    if 0x20 <= symbol <= 0xFF:
        return chr(symbol)
    return NAMES.get(symbol, str(symbol))


def main() -> None:
    display = Display()
    root = display.screen().root
    size = root.get_geometry()
    window = root.create_window(
        0, 0, size.width, size.height, 0, X.CopyFromParent, background_pixel=0
    )
    window.change_attributes(event_mask=EVENTS | X.KeyPressMask | X.KeyReleaseMask)
    fullscreen = display.intern_atom("_NET_WM_STATE_FULLSCREEN")
    window.change_property(
        display.intern_atom("_NET_WM_STATE"), display.intern_atom("ATOM"), 32, [fullscreen]
    )
    window.map()
    with open(sys.argv[1], "w", buffering=1, encoding="utf-8") as log:
        while True:
            event = display.next_event()
            if event.type == X.MappingNotify:
                display.refresh_keyboard_mapping(event)
                continue
            line: list[object] = []
            if event.type in (X.ButtonPress, X.ButtonRelease):
                kind = "down" if event.type == X.ButtonPress else "up"
                line = [kind, BUTTONS[event.detail], event.root_x, event.root_y]
            elif event.type in (X.KeyPress, X.KeyRelease):
                line = ["key", key_name(display, event), event.type == X.KeyPress]
            elif event.type == X.MotionNotify:
                line = ["move", event.root_x, event.root_y]
            if line:
                log.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
