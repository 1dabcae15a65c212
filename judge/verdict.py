"""Reading a judge's reply: one JSON object of the rubric's form, or no verdict. Never a substring."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from rayloop.judge.api import VerdictKind

VERSION = 1
"""Part of the judge's fingerprint. Raise it with every change of what a reply is read as; a test fails otherwise."""
SCORES = (0, 0.25, 0.5, 0.75, 1)
"""The scores that a scored rubric allows."""
FIELDS: dict[str, tuple[str, tuple[Any, ...]]] = {"binary": ("verdict", ("correct", "incorrect")), "scored": ("score", SCORES)}
"""The key of a reply beside ``reason``, and its values, by the rubric's kind."""


class InvalidVerdict(ValueError):
    """A reply that is no verdict. The message gives the reason, with the reply's beginning."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict as the model gave it: ``score`` in [0, 1]; for a scored rubric ``verdict`` is correct from 0.5."""

    verdict: VerdictKind
    score: float
    reason: str


def parse(text: str, kind: Literal["binary", "scored"]) -> Judgement:
    """The verdict of a whole reply. Raises InvalidVerdict for anything but the one object of this kind."""
    name, allowed = FIELDS[kind]
    try:
        # strict=False: a grammar with a maxLength lets engines write control characters into the reason.
        data = json.loads(text, strict=False, object_pairs_hook=_unique, parse_constant=_no_constant)
        if not isinstance(data, dict) or data.keys() != {"reason", name} or not isinstance(data["reason"], str):
            raise ValueError(f"expected an object of reason and {name}")
        if isinstance(data[name], bool) or data[name] not in allowed:
            raise ValueError(f"{name} is none of {', '.join(map(str, allowed))}")
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidVerdict(f"the judge's reply is no verdict ({error}): {text[:120]!r}") from error
    score = float(data[name] == "correct") if kind == "binary" else float(data[name])
    # At most 200 characters, without the lone surrogates that an escape such as \ud83d leaves: UTF-8 has none.
    reason = data["reason"][:200].encode(errors="ignore").decode()
    return Judgement(VerdictKind.CORRECT if score >= 0.5 else VerdictKind.INCORRECT, score, reason)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")
