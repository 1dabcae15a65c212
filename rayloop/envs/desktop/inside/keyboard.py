"""Exact typing by XTEST: every character arrives, even if the keyboard layout lacks it.

A new line is Return.
"""

import time
from collections.abc import Sequence

from Xlib import XK, X
from Xlib.display import Display
from Xlib.ext import xtest

NAMES = {
    "ctrl": "Control_L",
    "shift": "Shift_L",
    "alt": "Alt_L",
    "meta": "Super_L",
    "enter": "Return",
    "tab": "Tab",
    "space": "space",
    "backspace": "BackSpace",
    "delete": "Delete",
    "insert": "Insert",
    "esc": "Escape",
    "up": "Up",
    "down": "Down",
    "left": "Left",
    "right": "Right",
    "home": "Home",
    "end": "End",
    "pageup": "Prior",
    "pagedown": "Next",
    **{f"f{number}": f"F{number}" for number in range(1, 13)},
}
"""The grammar's names of keys that write nothing (rayloop/envs/grammar/calls.py) -> X's."""
CONTROL = {"\n": 0xFF0D, "\r": 0xFF0D, "\t": 0xFF09, "\b": 0xFF08}
NOTICED_AFTER_S = 0.5
"""Seconds in which programs have read keys typed before, or a changed keyboard map.

On two busy cores 0.15 was too short.
"""


class Keyboard:
    """The keyboard of a display.

    Characters that its layout lacks are put on keycodes that mean nothing.
    """

    def __init__(self, display: Display) -> None:
        self._display = display
        info = display.display.info
        self._first_code = info.min_keycode
        code_count = info.max_keycode - info.min_keycode + 1
        self._code_count = code_count
        mapping = display.get_keyboard_mapping(self._first_code, code_count)
        free = [self._first_code + index for index, keys in enumerate(mapping) if not any(keys)]
        self._free = free[::-1]
        self._shift, _ = self._key("shift")

    def press(self, keys: Sequence[str]) -> None:
        """Press keys together, as ``ctrl`` and ``s``. Raises ValueError for an unknown key."""
        codes: list[int] = []
        for key in keys:
            code, needs_shift = self._key(key)
            # Without it the key of ``?`` writes a slash.
            if needs_shift and self._shift not in codes:
                codes.append(self._shift)
            codes.append(code)
        for code in codes:
            xtest.fake_input(self._display, X.KeyPress, code)
        for code in reversed(codes):
            xtest.fake_input(self._display, X.KeyRelease, code)
        self._display.sync()

    def hold(self, key: str, down: bool) -> None:
        """Press a key that stays down, or release it. Raises ValueError for an unknown key."""
        code, _ = self._key(key)
        xtest.fake_input(self._display, X.KeyPress if down else X.KeyRelease, code)
        self._display.sync()

    def type(self, text: str, delay: float) -> None:
        """Type a text, with ``delay`` seconds after each character.

        Raises ValueError for a character that cannot be typed, such as a NUL.
        """
        text = text.replace("\r\n", "\n")
        for character in text:
            if not (character.isprintable() or character in CONTROL):
                raise ValueError(f"{character!r} cannot be typed")
        while text:
            length = self._teach(text)
            for character in text[:length]:
                self._strike(*self._place(character))
                time.sleep(delay)
            text = text[length:]

    def _teach(self, text: str) -> int:
        """Add missing characters to the layout; returns how many of the first it then has.

        There may be fewer free keycodes than missing characters.
        """
        missing: list[str] = []
        length = len(text)
        for index, character in enumerate(text):
            if character in missing or self._lookup(character) is not None:
                continue
            if len(missing) == len(self._free):
                length = index
                break
            missing.append(character)
        if missing:
            time.sleep(NOTICED_AFTER_S)
            for keycode, character in zip(self._free, missing, strict=False):
                self._display.change_keyboard_mapping(keycode, [[_symbol(character)] * 2])
            self._display.sync()
            # python-xlib looks keycodes up in a copy of the map that it made at the start.
            self._display._update_keymap(self._first_code, self._code_count)
            time.sleep(NOTICED_AFTER_S)
        return length

    def _strike(self, code: int, shifted: bool) -> None:
        if shifted:
            xtest.fake_input(self._display, X.KeyPress, self._shift)
        xtest.fake_input(self._display, X.KeyPress, code)
        xtest.fake_input(self._display, X.KeyRelease, code)
        if shifted:
            xtest.fake_input(self._display, X.KeyRelease, self._shift)
        self._display.sync()

    def _place(self, character: str) -> tuple[int, bool]:
        place = self._lookup(character)
        if place is None:
            raise RuntimeError(f"the keyboard did not learn {character!r}")
        return place

    def _lookup(self, character: str) -> tuple[int, bool] | None:
        """Return a character's keycode, and whether with shift; None when the layout lacks it."""
        for code, level in self._display.keysym_to_keycodes(_symbol(character)):
            if level in (0, 1):
                return code, level == 1
        return None

    def _key(self, name: str) -> tuple[int, bool]:
        """Return a key's code, and whether it is pressed with shift. Raises ValueError."""
        place: tuple[int, bool] | None = None
        if name in NAMES:
            code = self._display.keysym_to_keycode(XK.string_to_keysym(NAMES[name]))
            place = (int(code), False) if code else None
        elif len(name) == 1:
            place = self._lookup(name)
        if place is None:
            raise ValueError(f"there is no key {name!r}")
        return place


def _symbol(character: str) -> int:
    if character in CONTROL:
        return CONTROL[character]
    return ord(character) if ord(character) < 256 else 0x01000000 + ord(character)
