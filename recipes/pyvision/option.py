"""The measure of questions with options (V*, HR-Bench): is the option that the answer names the right one?"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rayloop.core.groups import Outcome, Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task, Trajectory
from rayloop.judge.rules.plain import extract
from rayloop.judge.rules.question import Question
from rayloop.recipes.pyvision.verifiers import decided

_NEGATED = re.compile(r"\b(?:not|no|nor|neither|never|cannot|except|rather than|instead of)\b|n't\b", re.IGNORECASE)
_LETTER = re.compile(r"(?<![\w'])([A-Z])(?![\w'])")
_ARTICLE = re.compile(r"(?<![\w'(])A(?= (?!or\b|and\b)[a-z])")


class OptionReward:
    """1 for the right option, 0 for another, without a model: a letter, the option's words, or a sentence with one of them.

    The answer stands in the last ``<answer>`` block, in a box in it or not, else in the last line, else in the whole turn. Of a
    sentence the letter is inferred as VLMEvalKit does (arXiv 2407.11691), and only when nothing in it contradicts. Components:
    ``accuracy``, and ``format`` (1 with such a block). An answer in which no option is found counts as wrong, with the flag
    ``undecided``.
    """

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        """1 or 0, with the flag ``undecided`` when no option is found."""
        said = context.texts[-1] if context.texts else ""
        asked = str(task.extra.get("question", ""))
        tagged = extract(said, "tagged_box")
        answers = [tagged] if tagged else [extract(said, "last_line") or "", said.rpartition("</think>")[2]]
        for answer in answers:
            found = decided(str(task.ground_truth), answer, asked)
            if found.flags and (letter := inferred(answer, Question(asked, False).options)):
                found = decided(str(task.ground_truth), letter, asked)
            if not found.flags:
                break
        components = {"accuracy": found.value, "format": float(tagged is not None)}
        return Scored(found.value, components, found.flags)


def inferred(answer: str, options: Mapping[str, str]) -> str | None:
    """The letter of the one option that a sentence names, by its letter, its words or both; None for several, and for one that
    denies something. ``options``: letter -> words."""
    if _NEGATED.search(answer):
        return None
    plain = _ARTICLE.sub(" ", answer)
    letters = {letter for letter in _LETTER.findall(plain) if letter in options}
    lower = answer.lower()
    named = {letter for letter, words in options.items() if words and re.search(rf"(?<!\w){re.escape(words.lower())}(?!\w)", lower)}
    found = letters or named
    return next(iter(found)) if len(found) == 1 and named <= found else None
