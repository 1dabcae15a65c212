"""Whether an answer is right: by a rule of ``judge/rules``, by a judge, or by its option.

The data source decides which one.
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
"""The rules of PyVision-RL's router; a judge decides every other source."""
Judged = Outcome
"""``Scored`` with the accuracy as its value, or the reason for its absence."""
WRONG = Scored(0.0)
RIGHT = Scored(1.0)
UNDECIDED = Scored(0.0, flags=("undecided",))


@dataclass(frozen=True)
class Asked:
    """An answer with the judge's arguments.

    The context's last text holds the answer in its form.
    """

    answer: str
    trajectory: Trajectory
    task: Task
    context: ScoreContext


class Verifiers:
    """A verifier for each data source."""

    def __init__(
        self,
        sources: Mapping[str, Kind],
        judge: Component | None,
        math_timeout: float,
        needed: Mapping[str, Kind],
        *,
        confirm: bool = True,
    ) -> None:
        """Build the judge.

        ``confirm``: that math-verify accepts an answer is not enough (``MathVerifier``). Raises
        ConfigError when one of ``needed`` is ``math`` and math-verify is not installed.
        """
        self._sources = sources
        self._math_timeout = math_timeout
        self._confirm = confirm
        self._judge: RewardSource | None = judge.build() if judge else None
        self.has_judge = self._judge is not None
        self.infrastructure = getattr(self._judge, "infrastructure", ())
        self._kinds: dict[str, Kind] = {}
        if "math" in needed.values():
            _ = self.math

    @cached_property
    def math(self) -> MathVerifier:
        """The verifier of mathematics. Raises ConfigError where math-verify is not installed."""
        return MathVerifier(self._math_timeout, self._confirm)

    def kind(self, source: str) -> Kind:
        """The rule of the first pattern that fits; an exact name goes first."""
        if source not in self._kinds:
            self._kinds[source] = self._first_match(source)
        return self._kinds[source]

    def _first_match(self, source: str) -> Kind:
        if source in self._sources:
            return self._sources[source]
        for pattern, kind in self._sources.items():
            if fnmatchcase(source, pattern):
                return kind
        return "rules" if self._judge is None else "judge"

    def judged(self, asked: Asked) -> Judged | Awaitable[Judged]:
        """The accuracy, from 0 to 1.

        Raises the judge's errors, and DataFailure for a task without the truth of its rule.
        """
        match self.kind(asked.task.source):
            case "mra":
                return _relative(asked)
            case "option":
                # The letter, as B, (B), B. red or the option's words; anything else is wrong.
                verdict = decided(reference(asked.task), asked.answer, question(asked.task))
                return replace(verdict, flags=())
            case "math":
                return self._equivalent_or_asked(asked)
            case "rules":
                return _ruled(asked)
        return self.asked(asked)

    def asked(self, asked: Asked) -> Judged | Awaitable[Judged]:
        """The judge's verdict; without a judge the rules'."""
        if self._judge is None:
            return _ruled(asked)
        return self._judge.score(asked.trajectory, asked.task, asked.context)

    async def _equivalent_or_asked(self, asked: Asked) -> Judged:
        """The judge decides answers that mathematics leaves undecided."""
        verdict = await self.equivalent(asked)
        if not verdict.flags or self._judge is None:
            return verdict
        judged = self.asked(asked)
        return await judged if isinstance(judged, Awaitable) else judged

    async def equivalent(self, asked: Asked) -> Scored:
        """Right or wrong by mathematics; wrong and ``undecided`` where that decides nothing.

        The rules refuse first: math-verify also reads texts that are not formulas.
        """
        true = reference(asked.task)
        if self._confirm and decided(true, asked.answer, question(asked.task)) == WRONG:
            return WRONG
        same = await asyncio.to_thread(self.math.same, true, asked.answer)
        return _verdict(same)


def _verdict(right: bool | None) -> Scored:
    if right is None:
        return UNDECIDED
    return RIGHT if right else WRONG


def at_once(
    judged: Judged | Awaitable[Judged], then: Callable[[Judged], Outcome]
) -> Outcome | Awaitable[Outcome]:
    """``then(judged)``, at once or when ``judged`` is awaited."""
    return _later(judged, then) if isinstance(judged, Awaitable) else then(judged)


async def _later(judged: Awaitable[Judged], then: Callable[[Judged], Outcome]) -> Outcome:
    return then(await judged)


def _ruled(asked: Asked) -> Judged:
    """Right, wrong, or wrong with the flag ``undecided``."""
    true = str(asked.task.ground_truth).strip()
    said = asked.answer
    if said == true or said.casefold() == true.casefold():
        return RIGHT
    return decided(reference(asked.task), said, question(asked.task))


def decided(true: str, said: str, asked: str) -> Scored:
    """The verdict of the judge's rules on an answer to the question ``asked``.

    It is wrong and ``undecided`` where no rule decides.
    """
    return _verdict(decide(true, said, question=asked).correct)


def _relative(asked: Asked) -> Judged:
    """The mean relative accuracy of the first number. Raises DataFailure without a true number."""
    truth = asked.task.ground_truth
    true = truth if isinstance(truth, int | float) else first_number(str(truth))
    if true is None:
        raise DataFailure(
            f"task {asked.task.id}",
            f"the ground truth {truth!r:.60} has no number, which mra compares",
        )
    said = first_number(asked.answer)
    if said is None:
        return Scored(0.0, flags=("no_number",))
    return Scored(mean_relative_accuracy(true, said))


def question(task: Task) -> str:
    """The task's question; empty for a saved completion that has none."""
    return question_of(task) if task.messages else ""


_NEGATED = re.compile(
    r"\b(?:not|no|nor|neither|never|cannot|except|rather than|instead of)\b|n't\b", re.IGNORECASE
)
_LETTER = re.compile(r"(?<![\w'])([A-Z])(?![\w'])")
_ARTICLE = re.compile(r"(?<![\w'(])A(?= (?!or\b|and\b)[a-z])")


class OptionReward:
    """1 for the right option, 0 for another, without a model.

    An option is a letter, the option's words, or a sentence with one of them. The answer is the
    last ``<answer>`` block, else the last line, else the turn. The letter of a sentence is inferred
    as VLMEvalKit does (arXiv:2407.11691). Components: ``accuracy``, ``format`` (1 with such a
    block). Without an option a judge is asked; without a judge: 0, flag ``undecided``.
    """

    class Settings(SettingsModel):
        """Decides where no option is found."""

        judge: Annotated[Component, Role("reward source", ("score",))] | None = None
        """The judge of answers that name no option, as in the papers' evaluations.

        For example ``{use: "rayloop.judge.reward:JudgeReward", with: {answer: tagged_box}}``.
        Without one such an answer is wrong.
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
        text = context.texts[-1] if context.texts else ""
        tagged = extract(text, "tagged_box")
        if tagged:
            answers = [tagged]
        else:
            answers = [extract(text, "last_line") or "", text.rpartition("</think>")[2]]
        for answer in answers:
            verdict = _option_verdict(task, answer)
            if not verdict.flags:
                break

        def paid(judged: Judged) -> Outcome:
            if not isinstance(judged, Scored):
                return judged
            components = {"accuracy": judged.value, "format": float(tagged is not None)}
            return Scored(judged.value, components, judged.flags, reason=judged.reason)

        if verdict.flags and self._judge is not None:
            return at_once(self._judge.score(trajectory, task, context), paid)
        return paid(verdict)


def _option_verdict(task: Task, answer: str) -> Scored:
    """The verdict on an answer as it is, else on the option that it names."""
    true = str(task.ground_truth)
    asked = str(task.extra.get("question", ""))
    verdict = decided(true, answer, asked)
    if not verdict.flags:
        return verdict
    letter = inferred(answer, Question(asked, False).options)
    return decided(true, letter, asked) if letter else verdict


def inferred(answer: str, options: Mapping[str, str]) -> str | None:
    """The letter of the one option (letter -> words) that a sentence names.

    None for several, and for a denial.
    """
    if _NEGATED.search(answer):
        return None
    by_letter = set(_LETTER.findall(_ARTICLE.sub(" ", answer))) & options.keys()
    by_words = {letter for letter, words in options.items() if _has_words(answer, words)}
    letters = by_letter or by_words
    if len(letters) != 1 or not by_words <= letters:
        return None
    return next(iter(letters))


def _has_words(answer: str, words: str) -> bool:
    """Whether the answer has an option's words, in any case."""
    pattern = rf"(?<!\w){re.escape(words.lower())}(?!\w)"
    return words != "" and re.search(pattern, answer.lower()) is not None
