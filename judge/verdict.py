"""Reading a judge's reply: one JSON object of the rubric's schema, or no verdict. Never a substring."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rayloop.judge.api import VerdictKind

VERSION = 1
"""In the judge's fingerprint. Raise it with every change of what a reply is read as; a test notices one."""
SCORES = (0, 0.25, 0.5, 0.75, 1)
"""What a scored rubric allows."""


class InvalidVerdict(ValueError):
    """A reply that is no verdict. The message says why, with the reply's beginning."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict as the model gave it: ``score`` in [0, 1]; for a scored rubric ``verdict`` is correct from 0.5."""

    verdict: VerdictKind
    score: float
    reason: str


class _Reply(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    reason: str


class _Binary(_Reply):
    verdict: Literal["correct", "incorrect"]


class _Score(_Reply):
    score: float


def parse(text: str, kind: Literal["binary", "scored"]) -> Judgement:
    """The verdict of a whole reply. Raises InvalidVerdict for anything but the one object that was asked for."""
    try:
        # strict=False: a grammar with a maxLength lets engines write control characters into the reason.
        data = json.loads(text, strict=False, object_pairs_hook=_unique, parse_constant=_no_constant)
        if kind == "binary":
            binary = _Binary.model_validate(data)
            verdict = VerdictKind(binary.verdict)
            return Judgement(verdict, float(verdict is VerdictKind.CORRECT), _clean(binary.reason))
        scored = _Score.model_validate(data)
    except (ValueError, ValidationError, RecursionError) as error:
        first = str(error).partition("\n")[0]
        raise InvalidVerdict(f"the judge's reply is no verdict ({first}): {text[:120]!r}") from error
    if scored.score not in SCORES:
        raise InvalidVerdict(f"the judge's score is none of {', '.join(map(str, SCORES))}: {text[:120]!r}")
    return Judgement(VerdictKind.CORRECT if scored.score >= 0.5 else VerdictKind.INCORRECT, scored.score, _clean(scored.reason))


def _clean(reason: str) -> str:
    """At most 200 characters, without the lone surrogates that an escape such as ``\\ud83d`` leaves: UTF-8 has none."""
    return reason[:200].encode(errors="ignore").decode()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")
