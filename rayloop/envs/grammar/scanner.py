"""Reads a policy's turn in the UI-TARS action grammar (docs/environments.md).

Every text becomes ``Actions`` or a ``Mistake``, and none raises. The actions follow the last line
that begins with ``Action:``, with blanks or lines between them. Points are written ``(x,y)``,
``<|box_start|>(x,y)<|box_end|>`` or ``<point>x y</point>``; the middle of a box of four numbers is
a point too. A backslash escapes as in Python (``ESCAPES``); a quote within an argument (``it's``)
is a letter.
"""

from dataclasses import dataclass
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
MAX_NUMBER_CHARACTERS = 12
"""Characters of a number, at most."""
QUOTED_CHARACTERS = 24
"""Characters of the text that a mistake quotes."""
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")
_DIGITS = frozenset("0123456789")


def read(text: str) -> Actions | Mistake:
    """Return the turn in the text, with points as written, or where and why it is not a turn."""
    start = _mark(text)
    if start is None:
        return Mistake(f"no line begins with '{MARK}'", len(text), "")
    thought = text[:start].strip().removeprefix(THOUGHT).strip()
    try:
        return Actions(thought, _Scanner(text, start + len(MARK)).actions())
    except _Stop as stop:
        reason, position = stop.args
        return Mistake(reason, position, text[position : position + QUOTED_CHARACTERS])


class _Stop(Exception):
    """No actions follow. It has the reason, and where the text stops."""


def _mark(text: str) -> int | None:
    """Return where the last line begins that starts with the mark; else the last mark anywhere."""
    end = len(text)
    position = text.rfind(MARK, 0, end)
    while position >= 0:
        line_start = text.rfind("\n", 0, position) + 1
        first_letter = position - len(text[line_start:position].lstrip())
        if text.startswith(MARK, first_letter):
            return first_letter
        # The search continues before this line, so that many marks in a line cost no more than one.
        position = text.rfind(MARK, 0, line_start)
    last = text.rfind(MARK)
    return last if last >= 0 else None


@dataclass
class _Scanner:
    """Walks through ``text`` from ``at``."""

    text: str
    at: int

    def actions(self) -> tuple[Action, ...]:
        actions: list[Action] = []
        self._blanks()
        while not self._ended():
            actions += self._call()
            self._blanks()
        if not actions:
            raise _Stop(f"no action follows '{MARK}'", self.at)
        return tuple(actions)

    def _ended(self) -> bool:
        """Return whether the text ends here, or a mark of the chat template follows."""
        at_mark = self.text.startswith(("<|im_end|>", "<|endoftext|>"), self.at)
        return self.at >= len(self.text) or at_mark

    def _call(self) -> tuple[Action, ...]:
        """Return the actions that one call means."""
        start = self.at
        name = self._word()
        function = FUNCTIONS.get(name)
        if function is None:
            reason = "an action was expected"
            if name:
                reason = f"unknown action {name[:QUOTED_CHARACTERS]!r}"
            raise _Stop(reason, start)
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
            actions = function.make(**values)
        except ValueError as error:
            raise _Stop(str(error), start) from error
        return actions if isinstance(actions, tuple) else (actions,)

    def _argument(self, name: str, function: CallSignature, values: dict[str, Any]) -> None:
        self._blanks()
        start = self.at
        word = self._word()
        argument = function.argument(word)
        if argument is None:
            examples = ", ".join(f"{argument.names[0]}='...'" for argument in function.arguments)
            raise _Stop(f"{name} takes {examples or 'no arguments'}", start)
        if argument.field in values:
            raise _Stop(f"{name} is given {word!r} twice", start)
        self._expect("=", f"behind {word}")
        self._blanks()
        start = self.at
        values[argument.field] = _value(argument, word, self._quoted(word), start)

    def _quoted(self, word: str) -> str:
        """Return the text between quotes, escapes resolved."""
        quote = self._here()
        start = self.at
        if quote not in ("'", '"'):
            raise _Stop(f"{word} must be a text in quotes", start)
        self.at += 1
        letters: list[str] = []
        while self.at < len(self.text):
            letter = self.text[self.at]
            next_letter = self.text[self.at + 1 : self.at + 2]
            if letter == "\\" and next_letter in ESCAPES:
                letters.append(ESCAPES[next_letter])
                self.at += 2
                continue
            self.at += 1
            if letter == quote and self._closes():
                return "".join(letters)
            letters.append(letter)
        raise _Stop(f"the quote of {word} is never closed", start)

    def _closes(self) -> bool:
        """Return whether a quote ends its argument.

        It does when another argument follows, or a ')' with a blank or the end behind it.
        """
        at = self._skip(self.at)
        if at >= len(self.text):
            return True
        if self.text.startswith(",", at):
            return self._starts_argument(at + 1)
        next_letter = self.text[at + 1 : at + 2]
        ends_call = not next_letter.strip() or self.text.startswith("<|", at + 1)
        return self.text.startswith(")", at) and ends_call

    def _starts_argument(self, at: int) -> bool:
        """Return whether a name and a '=' follow."""
        start = self._skip(at)
        end = start
        # The limit keeps the time linear when a text has many quotes.
        limit = min(len(self.text), start + 2 * QUOTED_CHARACTERS)
        while end < limit and self.text[end] in _LETTERS:
            end += 1
        return end > start and self.text.startswith("=", self._skip(end))

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


def _value(argument: Argument, word: str, text: str, at: int) -> Any:
    """Return what an argument's text means. ``at`` is where it stands."""
    if argument.kind == "point":
        place = point(text)
        if place is None:
            raise _Stop(f"{word} must be a point such as '(12,34)' or '<point>12 34</point>'", at)
        return place
    if argument.kind == "direction":
        if text.strip().lower() not in DIRECTIONS:
            raise _Stop(f"{word} must be one of {', '.join(DIRECTIONS)}", at)
        return text.strip().lower()
    if argument.kind == "key":
        name = key(text.strip())
        if name is None:
            raise _Stop(f"there is no key {text[:QUOTED_CHARACTERS]!r}", at)
        return name
    if argument.kind == "seconds":
        return _number(text.strip())
    if argument.kind == "keys":
        names = keys(text)
        if names is None or len(names) > MOST_KEYS:
            raise _Stop(
                f"{word} must be 1 to {MOST_KEYS} keys with blanks between, such as 'ctrl c'", at
            )
        return names
    return text


def point(text: str) -> Point | None:
    """Return the point of two numbers, or the middle of a box of four; None for other texts."""
    inside = text.strip()
    for left, right in WRAPPERS:
        if inside.startswith(left):
            inside = inside.removeprefix(left).removesuffix(right).strip()
    for left, right in ("()", "[]"):
        if inside.startswith(left) and inside.endswith(right):
            inside = inside[1:-1]
    parts = inside.replace(",", " ", 3).split(None, 4)
    numbers = [number for number in map(_number, parts) if number is not None]
    if len(parts) not in (2, 4) or len(numbers) < len(parts):
        return None
    return Point((numbers[0] + numbers[-2]) / 2, (numbers[1] + numbers[-1]) / 2)


def _number(text: str) -> float | None:
    """Return the number of decimal digits with an optional sign and point; None for other texts."""
    digits = text.removeprefix("-").replace(".", "", 1)
    if not digits or len(text) > MAX_NUMBER_CHARACTERS or not _DIGITS.issuperset(digits):
        return None
    return float(text)
