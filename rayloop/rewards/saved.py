"""Completions that were saved, and what a recipe says about scoring them without a run: ``SCORING`` in its module ``score``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayloop.core.failures import DataFailure
from rayloop.core.types import Task

TEXTS = ("completion", "completions", "response", "solution_str", "texts", "text", "turns", "messages")
"""Columns in which completions are saved, the first that a row has counts: a text, a list of them (one per turn), messages
(those of the assistant), or the turns of a run's ``rollouts`` (those that were sampled)."""


@dataclass(frozen=True, slots=True)
class Saved:
    """One completion: the texts of the sampled turns, and the task with the truth."""

    texts: tuple[str, ...]
    task: Task
    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a recipe's rewards are asked offline.

    ``use`` is the reward's class. ``settings`` makes its ``with`` of a variant and of the one reward that is asked for (None: all).
    ``rewards`` are the components that may be asked for, ``aliases`` other names of them. ``read`` makes a ``Saved`` of a row and
    its place, and raises DataFailure. ``answer`` is what a variant reads as the answer. ``notes`` are lines for the end: what
    there is to say about all rows together, such as how they compare with columns of the file.
    """

    use: str
    variants: tuple[str, ...]
    rewards: tuple[str, ...]
    settings: Callable[[str, str | None], dict[str, Any]]
    read: Callable[[Mapping[str, Any], str], Saved]
    aliases: Mapping[str, str]
    answer: Callable[[Saved, str], str | None]
    notes: Callable[[Sequence[Saved], str], Sequence[str]] = lambda saved, variant: ()


def texts_of(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The sampled turns' texts of a row, at least one. Raises DataFailure."""
    name = next((name for name in TEXTS if row.get(name) is not None), None)
    if name is None:
        raise DataFailure(where, f"no completion: none of the columns {', '.join(TEXTS)}")
    value = row[name]
    parts = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    texts = tuple(text for part in parts if (text := _text(part)) is not None)
    if not texts:
        raise DataFailure(where, f"{name} must be a text, a list of texts, or turns, not {value!r:.100}")
    return texts


def _text(part: Any) -> str | None:
    """Of a turn that the policy said; None for others."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or not part.get("sampled", part.get("role", "assistant") == "assistant"):
        return None
    text = part.get("text", part.get("content"))
    return text if isinstance(text, str) else None


def truth_of(row: Mapping[str, Any], names: Sequence[str], where: str) -> Any:
    """The first of the columns that the row has. Raises DataFailure."""
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        raise DataFailure(where, f"no truth: none of the columns {', '.join(names)}")
    return row[name]


def parsed(value: Any) -> Any:
    """A column that may be JSON in a text, as parquet files have tables and boxes; what is none stays."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
