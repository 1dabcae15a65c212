"""Finding the answer in a policy's text: the last answer block, the last box, the last line, or all of it."""

from __future__ import annotations

import re
from typing import Literal

How = Literal["tagged_box", "tag", "box", "last_line", "whole"]

_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_BOX = re.compile(r"\\boxed\s*\{")
_GROUP = re.compile(r"\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or a character that a backslash makes text."""


def extract(text: str, how: How) -> str | None:
    """The answer, stripped; None when the text has none in this form. Of several the last one counts.

    ``tagged_box`` is a box inside an answer block, or the block's text when it has no box.
    """
    match how:
        case "whole":
            return text.strip()
        case "last_line":
            lines = text.strip().splitlines()
            return lines[-1].strip() if lines else None
        case "box":
            return boxed(text)
        case "tag" | "tagged_box":
            blocks = _TAG.findall(text)
            if not blocks:
                return None
            inside: str = blocks[-1].strip()
            box = boxed(inside) if how == "tagged_box" else None
            return inside if box is None else box


def boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` with balanced braces, in linear time; None without one.

    ``\{`` and ``\}`` do not count as braces. Braces around all of the content only group, and are left out.
    """
    starts = {match.end() for match in _BOX.finditer(text)}
    if not starts:
        return None
    opened: list[int] = []
    ends: dict[int, int] = {}
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            opened.append(brace.end())
        elif brace.group() == "}" and opened:
            ends[opened.pop()] = brace.start()
    if not (closed := starts & ends.keys()):
        return None
    start, end = (last := max(closed)), ends[last]
    while (group := _GROUP.match(text, start, end)) and not text[ends[group.end()] + 1 : end].strip():
        start, end = group.end(), ends[group.end()]
    return text[start:end].strip()
