"""Exact typing by XTEST: every character arrives, also those that the keyboard layout lacks, and a
new line is Return.
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
NOTICED = 0.5
"""Seconds in which programs have read keys typed before, or a changed keyboard map; on two busy
cores 0.15 was too short.
"""


class Keyboard:
    """The keyboard of a display.

    Characters that its layout lacks are put on keycodes that mean nothing.
    """

    def __init__(self, display: Display) -> None:
        self._display = display
        info = display.display.info
        self._first, self._count = info.min_keycode, info.max_keycode - info.min_keycode + 1
        mapping = display.get_keyboard_mapping(self._first, self._count)
        self._free = [
            self._first + index for index, symbols in enumerate(mapping) if not any(symbols)
        ][::-1]
        self._shift = self._key("shift")

    def press(self, keys: Sequence[str]) -> None:
        """All at once, as ``ctrl`` and ``s``. Raises ValueError for a key that no keyboard has."""
        codes = [self._key(key) for key in keys]
        for code in codes:
            xtest.fake_input(self._display, X.KeyPress, code)
        for code in reversed(codes):
            xtest.fake_input(self._display, X.KeyRelease, code)
        self._display.sync()

    def hold(self, key: str, down: bool) -> None:
        """One key goes down and stays, or up. Raises ValueError for a key that no keyboard has."""
        xtest.fake_input(self._display, X.KeyPress if down else X.KeyRelease, self._key(key))
        self._display.sync()

    def type(self, text: str, delay: float) -> None:
        """``delay``: seconds after each character.

        Raises ValueError for a character that is no text, such as a NUL.
        """
        text = text.replace("\r\n", "\n")
        if wrong := [
            character for character in text if not (character.isprintable() or character in CONTROL)
        ]:
            raise ValueError(f"{wrong[0]!r} cannot be typed")
        while text:
            length = self._teach(text)
            for character in text[:length]:
                self._strike(*self._place(character))
                time.sleep(delay)
            text = text[length:]

    def _teach(self, text: str) -> int:
        """Make the layout know the characters of ``text``; how many of the first ones it then
        knows.
        """
        missing: list[str] = []
        length = len(text)
        for index, character in enumerate(text):
            if character in missing or self._found(character) is not None:
                continue
            if len(missing) == len(self._free):
                length = index
                break
            missing.append(character)
        if missing:
            time.sleep(NOTICED)
            for keycode, character in zip(self._free, missing, strict=False):
                self._display.change_keyboard_mapping(keycode, [[_symbol(character)] * 2])
            self._display.sync()
            # python-xlib looks keycodes up in a copy of the map that it made at the start.
            self._display._update_keymap(self._first, self._count)
            time.sleep(NOTICED)
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
        place = self._found(character)
        if place is None:
            raise RuntimeError(f"the keyboard did not learn {character!r}")
        return place

    def _found(self, character: str) -> tuple[int, bool] | None:
        """Its keycode, and whether with shift; None when the layout lacks it."""
        for code, level in self._display.keysym_to_keycodes(_symbol(character)):
            if level in (0, 1):
                return code, level == 1
        return None

    def _key(self, name: str) -> int:
        symbol = (
            XK.string_to_keysym(NAMES[name])
            if name in NAMES
            else _symbol(name)
            if len(name) == 1
            else 0
        )
        if not symbol or not (code := self._display.keysym_to_keycode(symbol)):
            raise ValueError(f"there is no key {name!r}")
        return int(code)


def _symbol(character: str) -> int:
    if character in CONTROL:
        return CONTROL[character]
    return ord(character) if ord(character) < 256 else 0x01000000 + ord(character)
