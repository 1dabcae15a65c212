"""Texts that are hard for a reader, made of what its module looks for: the words of its source, and
how its patterns begin.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

op: Any = import_module("re._constants")
sre: Any = import_module("re._parser")

Text = Callable[[int], str]
"""Length in characters -> a text of about that length."""
MARKUP = (*"<([{'\"\\`|1,:-\n a", "a\n", "$$", "**", "--", "...")
MEMBERS = tuple("aA1 \n-_.,!\\{[(<é")
"""Characters of which one is in most sets."""
WORD = re.compile(r"<[\w|/-]+>:?|`+\w*|\\\w+\{?|[a-z_]+[(=]['\"]?")


def texts(source: str, patterns: list[re.Pattern[str]]) -> Iterator[Text]:
    """For each word: the word again and again, with something between, and with a run of something
    behind it.
    """
    for word in sorted(
        {*MARKUP, *_words(source), *(word for pattern in patterns for word in _beginnings(pattern))}
    ):
        yield partial(_many, word)
        yield partial(_many, word + " ")
        yield partial(_half, word)
        yield partial(_behind, word)


def _many(word: str, length: int) -> str:
    return word * (length // len(word))


def _half(word: str, length: int) -> str:
    return word * (length // 2 // len(word)) + " " * (length // 2)


def _behind(word: str, length: int) -> str:
    return word + word[-1] * length


def _words(source: str) -> set[str]:
    """Tags, fences, commands and the like in the text constants of a module."""
    constants = (
        node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)
    )
    short = (value for value in constants if isinstance(value, str) and len(value) < 200)
    return {word for value in short for word in WORD.findall(value.replace("\\s", " "))}


def _beginnings(pattern: re.Pattern[str]) -> set[str]:
    """How a match begins, up to each part that repeats."""
    begun, found = "", set[str]()
    for kind, value in sre.parse(pattern.pattern, pattern.flags):
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT) and begun:
            found.add(begun)
        begun += _sample(kind, value)
    return found | ({begun[:-1]} if len(begun) > 1 else set())


def _sample(kind: Any, value: Any) -> str:
    """A text that one part matches; "" for a place in the text."""
    if kind is op.LITERAL:
        return chr(value)
    if kind is op.NOT_LITERAL:
        return "b" if value == ord("a") else "a"
    if kind is op.ANY:
        return "a"
    if kind is op.IN:
        return next(
            one
            for one in (*MEMBERS, *map(chr, range(33, 0x3000)))
            if re.match(_written(value), one)
        )
    if kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
        return "".join(_sample(*one) for one in value[2]) * max(value[0], 1)
    if kind is op.SUBPATTERN:
        return "".join(_sample(*one) for one in value[-1])
    if kind is op.ATOMIC_GROUP:
        return "".join(_sample(*one) for one in value)
    if kind is op.BRANCH:
        return "".join(_sample(*one) for one in value[1][0])
    return ""


CATEGORIES = {
    "DIGIT": r"\d",
    "WORD": r"\w",
    "SPACE": r"\s",
    "NOT_DIGIT": r"\D",
    "NOT_WORD": r"\W",
    "NOT_SPACE": r"\S",
}


def _written(members: Any) -> str:
    """A set as a pattern."""
    out = ""
    for kind, value in members:
        if kind is op.NEGATE:
            out += "^"
        elif kind is op.LITERAL:
            out += re.escape(chr(value))
        elif kind is op.RANGE:
            out += f"{re.escape(chr(value[0]))}-{re.escape(chr(value[1]))}"
        else:
            out += CATEGORIES[str(value).removeprefix("CATEGORY_")]
    return f"[{out}]"
