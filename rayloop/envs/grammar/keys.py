"""Names of keys: one for each key, whatever a model calls it."""

from __future__ import annotations

import string

ALIASES = {
    "control": "ctrl", "ctl": "ctrl", "cmd": "meta", "command": "meta", "win": "meta", "super": "meta", "option": "alt",
    "return": "enter", "escape": "esc", "del": "delete", "ins": "insert", "spacebar": "space", "bksp": "backspace",
    "arrowup": "up", "arrowdown": "down", "arrowleft": "left", "arrowright": "right",
    "page_up": "pageup", "page_down": "pagedown", "pgup": "pageup", "pgdn": "pagedown", "plus": "+", "minus": "-",
}  # fmt: skip
"""What a model may write -> the name of the key."""
NAMED = (
    "ctrl", "shift", "alt", "meta", "enter", "tab", "space", "backspace", "delete", "insert", "esc",
    "up", "down", "left", "right", "home", "end", "pageup", "pagedown", *(f"f{n}" for n in range(1, 13)),
)  # fmt: skip
KEYS = frozenset((*NAMED, *string.ascii_lowercase, *string.digits, *string.punctuation))
"""All names: those of ``NAMED``, and the characters of a plain keyboard, letters in lower case."""


def key(written: str) -> str | None:
    """The key's name; None when there is no such key."""
    name = ALIASES.get(written.lower(), written.lower())
    return name if name in KEYS else None


def keys(written: str) -> tuple[str, ...] | None:
    """Of a combination, written with blanks or plus signs between: ``ctrl c``, ``ctrl+c``, ``ctrl +``. None when one is unknown or
    there is none."""
    found: list[str] = []
    for word in written.split():
        parts = [word] if key(word) else word.split("+")
        for part in parts:
            name = key(part)
            if name is None:
                return None
            found.append(name)
    return tuple(found) or None
