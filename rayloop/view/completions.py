"""Completions of a step for a terminal, as TRL prints them: the task, a heading, and a line for
each of a group's members.
"""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from rayloop.run.folder import RolloutRecord
from rayloop.view.words import visible

LONGEST = 400
"""Characters of a text that travel to the terminal's process."""
WIDE = 120
"""Columns of the lines where no terminal says how many there are."""
MARKUP = re.compile(r"<\|im_start\|>\w*\n?|<\|[^|<>]{1,40}\|>(?:×\d+)?")
"""Special tokens as ``chat.tokenizer.shown`` writes them."""


def completions(records: Sequence[RolloutRecord], count: int = 2) -> dict[str, Any]:
    """Of the first group whose rewards differ, or else the first one: its ``task``, and in ``rows``
    sample, reward, advantage and text of ``count`` members, from the best to the worst. Texts have
    one line and are cut; images are named.
    """
    groups = [list(members) for _, members in groupby(records, lambda record: record.group)]
    chosen = next((group for group in groups if len({one.reward for one in group}) > 1), groups[0])
    chosen.sort(key=lambda one: -math.inf if one.reward is None else one.reward, reverse=True)
    first, count = chosen[0], min(count, len(chosen))
    picked = [chosen[place * (len(chosen) - 1) // max(count - 1, 1)] for place in range(count)]
    asked = MARKUP.sub(" ", _cut(first.prompt, 10 * LONGEST))
    return {
        "task": _line(" ".join((f"{first.task}:", *map(_named, first.images), asked))),
        "rows": [(one.sample, one.reward, one.advantage, _line(_said(one))) for one in picked],
    }


def shown(found: Mapping[str, Any], console: Console) -> Text:
    """The lines for this console: no text is wider, and none has a character that it cannot write."""
    width = console.width if console.is_terminal else WIDE
    rows = [("  task ", found["task"]), ("  sample  reward advantage  ", "completion")]
    for sample, reward, advantage, text in found["rows"]:
        earned = (
            "none" if reward is None else f"{reward:.3f}",
            "-" if advantage is None else f"{advantage:+.3f}",
        )
        rows.append((f"  #{sample:<5} {earned[0]:>7} {earned[1]:>9}  ", text))
    lines = list[Text]()
    for head, text in rows:
        line = head + _cut(text, max(width - len(head), 8))
        lines.append(
            Text(
                line.encode(console.encoding, "backslashreplace").decode(console.encoding),
                no_wrap=True,
            )
        )
        lines[-1].truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)


def _said(record: RolloutRecord) -> str:
    """The sampled turns, with the names of images that came between them."""
    turns = [
        [_cut(turn.text, LONGEST)] if turn.sampled else [*map(_named, turn.images)]
        for turn in record.turns
    ]
    return " | ".join(part for turn in turns for part in turn)


def _named(image: Mapping[str, Any]) -> str:
    name = Path(image["path"]).name if "path" in image else image["sha256"][:8]
    return f"[image {name[-40:]} {image['width']}x{image['height']}]"


def _line(text: str) -> str:
    return _cut(visible(" ".join(_cut(text, 10 * LONGEST).split())), LONGEST)


def _cut(text: str, room: int) -> str:
    """Its beginning and, twice as long, its end."""
    return (
        text
        if len(text) <= room
        else f"{text[: room // 3 - 1]} … {text[len(text) - (room - room // 3 - 2) :]}"
    )
