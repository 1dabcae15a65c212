"""Whether an answer is right: by a rule of ``judge/rules`` that suits its data source, by a judge,
or by its option.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Annotated, Literal

from rayloop.config.settings import Component, Role, SettingsModel
from rayloop.core.failures import DataFailure
from rayloop.core.groups import Outcome, Scored
from rayloop.core.protocols import RewardSource, ScoreContext
from rayloop.core.types import Task, Trajectory
from rayloop.judge.mathematics import MathVerifier
from rayloop.judge.reward import question as question_of
from rayloop.judge.reward import reference
from rayloop.judge.rules.decision import decide, mean_relative_accuracy
from rayloop.judge.rules.plain import extract
from rayloop.judge.rules.quantities import first_number
from rayloop.judge.rules.question import Question

Kind = Literal["mra", "option", "math", "rules", "judge"]
SOURCES: Mapping[str, Kind] = {"vsi_numerical": "mra", "*_rule_verifiable": "mra"}
"""Of PyVision-RL's router: every other source is a judge's."""
Judged = Outcome
"""``Scored`` with the accuracy as its value, or why there is none."""
WRONG, RIGHT = Scored(0.0), Scored(1.0)


@dataclass(frozen=True, slots=True)
class Asked:
    """An answer with the judge's arguments; the context's last text holds the answer in its form."""

    answer: str
    trajectory: Trajectory
    task: Task
    context: ScoreContext


class Verifiers:
    """One of them for each data source."""

    def __init__(
        self,
        sources: Mapping[str, Kind],
        judge: Component | None,
        math_timeout: float,
        needed: Mapping[str, Kind],
        *,
        confirm: bool = True,
    ) -> None:
        """``confirm``: that math-verify accepts an answer is not enough (``MathVerifier``).

        Raises ConfigError when one of ``needed`` is ``math`` and math-verify is not installed.
        """
        self._sources, self._math_timeout, self._confirm = sources, math_timeout, confirm
        self._judge: RewardSource | None = judge.build() if judge else None
        self.has_judge = self._judge is not None
        self.infrastructure = getattr(self._judge, "infrastructure", ())
        self._kinds: dict[str, Kind] = {}
        if "math" in needed.values():
            _ = self.math

    @cached_property
    def math(self) -> MathVerifier:
        """Raises ConfigError where math-verify is not installed."""
        return MathVerifier(self._math_timeout, self._confirm)

    def kind(self, source: str) -> Kind:
        """The rule of the first pattern that fits; an exact name goes first."""
        if source not in self._kinds:
            other: Kind = "rules" if self._judge is None else "judge"
            fitting = (
                kind for pattern, kind in self._sources.items() if fnmatchcase(source, pattern)
            )
            self._kinds[source] = self._sources.get(source, next(fitting, other))
        return self._kinds[source]

    def judged(self, asked: Asked) -> Judged | Awaitable[Judged]:
        """The accuracy, from 0 to 1.

        Raises the judge's errors, and DataFailure for a task without the truth of its rule.
        """
        match self.kind(asked.task.source):
            case "mra":
                return _relative(asked)
            case (
                "option"
            ):  # the letter, as B, (B), B. red or the option's own words; anything else is wrong
                return replace(
                    decided(reference(asked.task), asked.answer, question(asked.task)), flags=()
                )
            case "math":
                return self._equivalent_or_asked(asked)
            case "rules":
                return _ruled(asked)
        return self.asked(asked)

    def asked(self, asked: Asked) -> Judged | Awaitable[Judged]:
        """The judge's verdict; without a judge the rules'."""
        return (
            _ruled(asked)
            if self._judge is None
            else self._judge.score(asked.trajectory, asked.task, asked.context)
        )

    async def _equivalent_or_asked(self, asked: Asked) -> Judged:
        """What mathematics leaves undecided is the judge's."""
        found = await self.equivalent(asked)
        if not found.flags or self._judge is None:
            return found
        judged = self.asked(asked)
        return await judged if isinstance(judged, Awaitable) else judged

    async def equivalent(self, asked: Asked) -> Scored:
        """Right or wrong by mathematics; wrong and ``undecided`` where that decides nothing.

        The rules refuse first: math-verify also reads what is no formula.
        """
        true = reference(asked.task)
        if self._confirm and decided(true, asked.answer, question(asked.task)) == WRONG:
            return WRONG
        same = await asyncio.to_thread(self.math.same, true, asked.answer)
        if same is None:
            return Scored(0.0, flags=("undecided",))
        return RIGHT if same else WRONG


def at_once(
    found: Judged | Awaitable[Judged], then: Callable[[Judged], Outcome]
) -> Outcome | Awaitable[Outcome]:
    """``then(found)``, at once or when ``found`` is awaited."""
    return _later(found, then) if isinstance(found, Awaitable) else then(found)


async def _later(found: Awaitable[Judged], then: Callable[[Judged], Outcome]) -> Outcome:
    return then(await found)


def _ruled(asked: Asked) -> Judged:
    """Right, wrong, or wrong with the flag ``undecided``."""
    true, said = str(asked.task.ground_truth).strip(), asked.answer
    if said == true or said.casefold() == true.casefold():
        return RIGHT
    return decided(reference(asked.task), said, question(asked.task))


def decided(true: str, said: str, asked: str) -> Scored:
    """The verdict of the judge's rules on an answer to the question ``asked``; wrong and
    ``undecided`` where no rule decides.
    """
    found = decide(true, said, question=asked)
    return (
        Scored(0.0, flags=("undecided",))
        if found.correct is None
        else RIGHT
        if found.correct
        else WRONG
    )


def _relative(asked: Asked) -> Judged:
    truth = asked.task.ground_truth
    true = truth if isinstance(truth, int | float) else first_number(str(truth))
    if true is None:
        raise DataFailure(
            f"task {asked.task.id}",
            f"the ground truth {truth!r:.60} has no number, which mra compares",
        )
    said = first_number(asked.answer)
    return (
        Scored(0.0, flags=("no_number",))
        if said is None
        else Scored(mean_relative_accuracy(true, said))
    )


def question(task: Task) -> str:
    """A saved completion may come without."""
    return question_of(task) if task.messages else ""


_NEGATED = re.compile(
    r"\b(?:not|no|nor|neither|never|cannot|except|rather than|instead of)\b|n't\b", re.IGNORECASE
)
_LETTER = re.compile(r"(?<![\w'])([A-Z])(?![\w'])")
_ARTICLE = re.compile(r"(?<![\w'(])A(?= (?!or\b|and\b)[a-z])")


class OptionReward:
    """1 for the right option, 0 for another, without a model: a letter, the option's words, or a
    sentence with one of them. The answer is the last ``<answer>`` block, else the last line, else
    the turn. The letter of a sentence is inferred as VLMEvalKit does (arXiv:2407.11691).
    Components: ``accuracy``, ``format`` (1 with such a block). Without an option a judge is asked;
    without a judge: 0, flag ``undecided``.
    """

    class Settings(SettingsModel):
        """Who decides where no option is found."""

        judge: Annotated[Component, Role("reward source", ("score",))] | None = None
        """Asked where an answer names no option, as the papers' evaluations do, for example ``{use:
        "rayloop.judge.reward:JudgeReward", with: {answer: tagged_box}}``; without one such an
        answer is wrong.
        """

    def __init__(self, settings: Settings | None = None) -> None:
        chosen = settings.judge if settings else None
        self._judge: RewardSource | None = chosen.build() if chosen else None
        self.infrastructure = getattr(self._judge, "infrastructure", ())

    def score(
        self, trajectory: Trajectory, task: Task, context: ScoreContext
    ) -> Outcome | Awaitable[Outcome]:
        """1 or 0, with the flag ``undecided`` when no option is found.

        Raises the judge's errors.
        """
        said = context.texts[-1] if context.texts else ""
        asked = str(task.extra.get("question", ""))
        tagged = extract(said, "tagged_box")
        answers = (
            [tagged]
            if tagged
            else [extract(said, "last_line") or "", said.rpartition("</think>")[2]]
        )
        for answer in answers:
            found = decided(str(task.ground_truth), answer, asked)
            if found.flags and (letter := inferred(answer, Question(asked, False).options)):
                found = decided(str(task.ground_truth), letter, asked)
            if not found.flags:
                break
        form = {"format": float(tagged is not None)}

        def paid(judged: Judged) -> Outcome:
            if not isinstance(judged, Scored):
                return judged
            return Scored(
                judged.value, {"accuracy": judged.value, **form}, judged.flags, reason=judged.reason
            )

        if found.flags and self._judge is not None:
            return at_once(self._judge.score(trajectory, task, context), paid)
        return paid(found)


def inferred(answer: str, options: Mapping[str, str]) -> str | None:
    """The letter of the one option (letter -> words) that a sentence names; None for several, and
    for a denial.
    """
    if _NEGATED.search(answer):
        return None
    letters = {letter for letter in _LETTER.findall(_ARTICLE.sub(" ", answer)) if letter in options}
    lower = answer.lower()
    named = {
        letter
        for letter, words in options.items()
        if words and re.search(rf"(?<!\w){re.escape(words.lower())}(?!\w)", lower)
    }
    found = letters or named
    return next(iter(found)) if len(found) == 1 and named <= found else None
