"""Completions of a step for a terminal, as TRL prints them.

They are the task, a heading, and a line for each of a group's members.
"""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from rayloop.run.records.rollouts import RolloutRecord
from rayloop.view.formatting import visible

MAX_TEXT_CHARACTERS = 400
"""The most characters of a text that are sent to the terminal's process."""
LINE_COLUMNS = 120
"""Columns of the lines when the output is not a terminal."""
MARKUP = re.compile(r"<\|im_start\|>\w*\n?|<\|[^|<>]{1,40}\|>(?:×\d+)?")
"""Special tokens as ``chat.tokenizer.shown`` writes them."""


def completions(records: Sequence[RolloutRecord], count: int = 2) -> dict[str, Any]:
    """A few members of the first group whose rewards differ, or else of the first group.

    The group's ``task``, and in ``rows`` sample, reward, advantage and text of ``count`` members,
    from the best to the worst. Texts have one line and are cut; images are named.
    """
    groups = [list(members) for _, members in groupby(records, lambda record: record.group)]
    group = next((members for members in groups if _rewards_differ(members)), groups[0])
    group.sort(key=_reward_or_lowest, reverse=True)
    count = min(count, len(group))
    places = [place * (len(group) - 1) // max(count - 1, 1) for place in range(count)]
    best = group[0]
    images = map(_image_name, best.images)
    prompt = MARKUP.sub(" ", _cut(best.prompt, 10 * MAX_TEXT_CHARACTERS))
    rows = []
    for place in places:
        member = group[place]
        rows.append((member.sample, member.reward, member.advantage, _line(_completion(member))))
    return {"task": _line(" ".join((f"{best.task}:", *images, prompt))), "rows": rows}


def _rewards_differ(members: Sequence[RolloutRecord]) -> bool:
    return len({member.reward for member in members}) > 1


def _reward_or_lowest(record: RolloutRecord) -> float:
    return -math.inf if record.reward is None else record.reward


def shown(found: Mapping[str, Any], console: Console) -> Text:
    """The lines for this console, none wider, and in characters that it can write."""
    width = console.width if console.is_terminal else LINE_COLUMNS
    rows = [("  task ", found["task"]), ("  sample  reward advantage  ", "completion")]
    for sample, reward, advantage, text in found["rows"]:
        reward_cell = "none" if reward is None else f"{reward:.3f}"
        advantage_cell = "-" if advantage is None else f"{advantage:+.3f}"
        rows.append((f"  #{sample:<5} {reward_cell:>7} {advantage_cell:>9}  ", text))
    encoding = console.encoding
    lines = []
    for head, text in rows:
        full_line = head + _cut(text, max(width - len(head), 8))
        writable = full_line.encode(encoding, "backslashreplace").decode(encoding)
        line = Text(writable, no_wrap=True)
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)


def _completion(record: RolloutRecord) -> str:
    """The sampled turns, with the names of the images between them."""
    parts: list[str] = []
    for turn in record.turns:
        if turn.sampled:
            parts.append(_cut(turn.text, MAX_TEXT_CHARACTERS))
        else:
            parts += map(_image_name, turn.images)
    return " | ".join(parts)


def _image_name(image: Mapping[str, Any]) -> str:
    name = Path(image["path"]).name if "path" in image else image["sha256"][:8]
    return f"[image {name[-40:]} {image['width']}x{image['height']}]"


def _line(text: str) -> str:
    return _cut(
        visible(" ".join(_cut(text, 10 * MAX_TEXT_CHARACTERS).split())), MAX_TEXT_CHARACTERS
    )


def _cut(text: str, room: int) -> str:
    """The beginning of a text that is too long and, twice as long, its end."""
    if len(text) <= room:
        return text
    third = room // 3
    end = len(text) - (room - third - 2)
    return f"{text[: third - 1]} … {text[end:]}"
