"""Reads a policy's turn in the UI-TARS action grammar (docs/environments.md): every text becomes
``Actions`` or a ``Mistake``, and none raises. What counts is behind the last line that begins with
``Action:``; several actions have blanks or lines between them. Points are written ``(x,y)``,
``<|box_start|>(x,y)<|box_end|>`` or ``<point>x y</point>``; the middle of a box of four numbers is
a point too. A backslash escapes as in Python (``ESCAPES``); a quote within an argument (``it's``)
is a letter.
"""

from typing import Any

from rayloop.envs.grammar.actions import Action, Actions, Mistake, Point
from rayloop.envs.grammar.calls import (
    DIRECTIONS,
    FUNCTIONS,
    MOST_KEYS,
    Argument,
    CallSignature,
    key,
    keys,
)

MARK = "Action:"
THOUGHT = "Thought:"
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}
"""Letter behind a backslash -> what the two mean.

A backslash before any other letter stands for itself.
"""
WRAPPERS = (("<|box_start|>", "<|box_end|>"), ("<point>", "</point>"), ("<bbox>", "</bbox>"))
NUMBER = 12
"""Characters of a number, at most."""
NEAR = 24
"""Characters of the text that a mistake quotes."""
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")
_DIGITS = frozenset("0123456789")


def read(text: str) -> Actions | Mistake:
    """The turn that the text is, with points as written; else where and why it is none."""
    start = _mark(text)
    if start is None:
        return Mistake(f"no line begins with '{MARK}'", len(text), "")
    thought = text[:start].strip().removeprefix(THOUGHT).strip()
    try:
        return Actions(thought, _Scanner(text, start + len(MARK)).actions())
    except _Stop as stop:
        return Mistake(stop.reason, stop.position, text[stop.position : stop.position + NEAR])


class _Stop(Exception):
    def __init__(self, reason: str, position: int) -> None:
        super().__init__(reason)
        self.reason, self.position = reason, position


def _mark(text: str) -> int | None:
    """Where the last line begins that starts with the mark; where none does, the last mark
    anywhere.
    """
    end = len(text)
    while (found := text.rfind(MARK, 0, end)) >= 0:
        # Each line is left behind once it was looked at, so many marks cost no more than one.
        line = end = text.rfind("\n", 0, found) + 1
        first = found - len(text[line:found].lstrip())
        if text.startswith(MARK, first):
            return first
    found = text.rfind(MARK)
    return found if found >= 0 else None


class _Scanner:
    """Walks through ``text`` from ``at``."""

    def __init__(self, text: str, at: int) -> None:
        self.text, self.at = text, at

    def actions(self) -> tuple[Action, ...]:
        found: list[Action] = []
        self._blanks()
        while not self._ended():
            found += self._call()
            self._blanks()
        if not found:
            raise _Stop(f"no action follows '{MARK}'", self.at)
        return tuple(found)

    def _ended(self) -> bool:
        """At the end, or at a mark of the chat template that the text was cut behind."""
        return self.at >= len(self.text) or self.text.startswith(
            ("<|im_end|>", "<|endoftext|>"), self.at
        )

    def _call(self) -> tuple[Action, ...]:
        """The actions that one call means."""
        start = self.at
        name = self._word()
        function = FUNCTIONS.get(name)
        if function is None:
            raise _Stop(
                f"there is no action {name[:NEAR]!r}" if name else "an action was expected", start
            )
        self._expect("(", f"behind {name}")
        values: dict[str, Any] = {}
        self._blanks()
        while self._here() != ")":
            if values:
                self._expect(",", f"or ')' in {name}(...)")
            self._argument(name, function, values)
            self._blanks()
        self.at += 1
        for argument in function.arguments:
            if argument.required and argument.field not in values:
                raise _Stop(f"{name} needs the argument {argument.names[0]!r}", start)
        try:
            made = function.make(**values)
        except ValueError as error:
            raise _Stop(str(error), start) from error
        return made if isinstance(made, tuple) else (made,)

    def _argument(self, name: str, function: CallSignature, values: dict[str, Any]) -> None:
        self._blanks()
        start = self.at
        word = self._word()
        argument = function.argument(word)
        if argument is None:
            takes = ", ".join(f"{argument.names[0]}='...'" for argument in function.arguments)
            raise _Stop(f"{name} takes {takes or 'no arguments'}", start)
        if argument.field in values:
            raise _Stop(f"{name} is given {word!r} twice", start)
        self._expect("=", f"behind {word}")
        self._blanks()
        start = self.at
        values[argument.field] = _value(argument, word, self._quoted(word), start)

    def _quoted(self, word: str) -> str:
        """The text between quotes, escapes resolved."""
        quote, start = self._here(), self.at
        if quote not in ("'", '"'):
            raise _Stop(f"{word} must be a text in quotes", start)
        self.at += 1
        letters: list[str] = []
        while self.at < len(self.text):
            letter = self.text[self.at]
            follows = self.text[self.at + 1 : self.at + 2]
            if letter == "\\" and follows in ESCAPES:
                letters.append(ESCAPES[follows])
                self.at += 2
                continue
            self.at += 1
            if letter == quote and self._closes():
                return "".join(letters)
            letters.append(letter)
        raise _Stop(f"the quote of {word} is never closed", start)

    def _closes(self) -> bool:
        """Whether a quote ends its argument: another argument follows, or a ')' with a blank or the
        end behind.
        """
        at = self._skip(self.at)
        if at >= len(self.text):
            return True
        if self.text.startswith(",", at):
            word = at = self._skip(at + 1)
            while at < len(self.text) and self.text[at] in _LETTERS and at - word < 2 * NEAR:
                at += 1
            return at > word and self.text.startswith("=", self._skip(at))
        behind = self.text[at + 1 : at + 2]
        return self.text.startswith(")", at) and (
            not behind.strip() or self.text.startswith("<|", at + 1)
        )

    def _word(self) -> str:
        start = self.at
        while self.at < len(self.text) and self.text[self.at] in _LETTERS:
            self.at += 1
        return self.text[start : self.at]

    def _here(self) -> str:
        if self.at >= len(self.text):
            raise _Stop("the text ends within an action", self.at)
        return self.text[self.at]

    def _expect(self, letter: str, where: str) -> None:
        self._blanks()
        if self._here() != letter:
            raise _Stop(f"{letter!r} was expected {where}", self.at)
        self.at += 1

    def _blanks(self) -> None:
        self.at = self._skip(self.at)

    def _skip(self, at: int) -> int:
        while at < len(self.text) and self.text[at].isspace():
            at += 1
        return at


def _value(argument: Argument, word: str, written: str, at: int) -> Any:
    """What an argument's text means. ``at`` is where it stands."""
    if argument.kind == "point":
        point = _point(written)
        if point is None:
            raise _Stop(f"{word} must be a point such as '(12,34)' or '<point>12 34</point>'", at)
        return point
    if argument.kind == "direction":
        if written.strip().lower() not in DIRECTIONS:
            raise _Stop(f"{word} must be one of {', '.join(DIRECTIONS)}", at)
        return written.strip().lower()
    if argument.kind == "key":
        name = key(written.strip())
        if name is None:
            raise _Stop(f"there is no key {written[:NEAR]!r}", at)
        return name
    if argument.kind == "keys":
        names = keys(written)
        if names is None or len(names) > MOST_KEYS:
            raise _Stop(
                f"{word} must be 1 to {MOST_KEYS} keys with blanks between, such as 'ctrl c'", at
            )
        return names
    return written


def _point(written: str) -> Point | None:
    """Of two numbers, or the middle of a box of four."""
    inside = written.strip()
    for left, right in WRAPPERS:
        if inside.startswith(left):
            inside = inside.removeprefix(left).removesuffix(right).strip()
    for left, right in ("()", "[]"):
        if inside.startswith(left) and inside.endswith(right):
            inside = inside[1:-1]
    numbers = [_number(part) for part in inside.replace(",", " ", 3).split(None, 4)]
    if len(numbers) not in (2, 4) or None in numbers:
        return None
    found = [number for number in numbers if number is not None]
    return Point((found[0] + found[-2]) / 2, (found[1] + found[-1]) / 2)


def _number(text: str) -> float | None:
    """Decimal digits with an optional sign and point; None for anything else, such as nan."""
    digits = text.removeprefix("-").replace(".", "", 1)
    if not digits or len(text) > NUMBER or not _DIGITS.issuperset(digits):
        return None
    return float(text)
