"""Finding the answer in what a policy wrote: the last answer block, the last box, the last line, or all of it."""

from __future__ import annotations

import re
from typing import Literal

How = Literal["tagged_box", "tag", "box", "last_line", "whole"]

_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def extract(text: str, how: How) -> str | None:
    """The answer, stripped; None when the text holds none in this form. Of several the last counts.

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
    r"""What the last ``\boxed{...}`` with balanced braces holds, or None."""
    for start in reversed([m.end() for m in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start:end].strip()
    return None
