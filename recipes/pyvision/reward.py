"""PyVision's reward: 1 for a right answer, and 0.1 more for each turn whose code ran.

The bonus makes a policy keep using its tool.
"""

from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from rayloop.config.settings import Component, Role, SettingsModel
from rayloop.core.groups import Outcome, Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task, Trajectory
from rayloop.judge.rules.decision import mean_relative_accuracy
from rayloop.judge.rules.plain import boxed, extract
from rayloop.recipes.pyvision import original
from rayloop.recipes.pyvision.data import answered
from rayloop.recipes.pyvision.verifiers import SOURCES, Asked, Judged, Kind, Verifiers, at_once

LONGEST = original.LONG_ANSWER_CHARACTERS


class PyVisionReward:
    """``accuracy + 1[right] * per_call * calls``.

    ``calls``: turns whose code ran, in ``corrected`` without an error; ``original`` also counts
    code that raised or took too long. For a saved completion without turns it is the environment's
    count. Components: ``accuracy``, ``calls``, ``right``, and ``format`` (1 when the answer is in
    its box). Flags: ``unparsable``, ``too_long``, ``undecided`` (no rule decides, and no judge is
    set), ``no_number``; in the original ``raised`` with the name of its error, and
    ``judge_failed``.
    """

    class Settings(SettingsModel):
        variant: Literal["corrected", "original"] = "corrected"
        """corrected: the answer of the last turn, and code without an error counts.

        original: the published functions with their mistakes (README.md), which read the first
        answer of the whole transcript, tool output included; to repeat or ablate a run.
        """
        published: Literal["multi_task_verifier", "general_verifier", "vl_agent"] = (
            "multi_task_verifier"
        )
        """The published function that ``original`` computes; the first was trained.

        Sources of ``verifiers`` keep their rule.
        """
        per_call: float = Field(0.1, ge=0)
        """Paid for each executed turn of a right answer.

        The original's 0.1; 0 pays for answers alone.
        """
        right_from: float = Field(0.5, ge=0, le=1)
        """The least accuracy that counts as right, where a judge gives shares."""
        verifiers: dict[str, Kind] = dict(SOURCES)
        """The rule of a data source, by its name or a pattern with ``*``.

        Rules are mra (mean relative accuracy of numbers), option (a letter), math (equivalence),
        rules (short answers) and judge (``accuracy``). All other sources: judge if there is one,
        else rules.
        """
        math_timeout: float = Field(5.0, gt=0)
        """Seconds for one comparison by math-verify.

        Then the judge is asked, and without one the answer is wrong. Raise it for long formulas.
        """
        accuracy: Annotated[Component, Role("reward source", ("score",))] | None = None
        """The reward source that judges the answer, such as ``rayloop.judge.reward:JudgeReward``.

        Without one, rules do: the same text but for case and blanks, the same number, option or
        list.
        """

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError when math-verify is asked for and not installed."""
        self._settings = settings
        self._verifiers = Verifiers(
            settings.verifiers, settings.accuracy, settings.math_timeout, settings.verifiers
        )
        self.infrastructure = self._verifiers.infrastructure
        self.transcript = settings.variant == "original"

    def score(
        self, trajectory: Trajectory, task: Task, context: ScoreContext
    ) -> Outcome | Awaitable[Outcome]:
        """Unscored when the judge fails.

        Raises the judge's errors, and DataFailure for a task without the truth of its rule.
        """
        if self._settings.variant == "original":
            return self._original(trajectory, task, context)
        text = context.texts[-1]
        answer = extract(text, "tagged_box")
        components = {
            "accuracy": 0.0,
            "calls": calls(trajectory, context),
            "right": 0.0,
            "format": float(answer is not None and boxed(text) is not None),
        }
        if not answer:
            return Scored(0.0, components, ("unparsable",))
        if len(answer) >= LONGEST:
            return Scored(0.0, components, ("too_long",))
        judged = self._verifiers.judged(Asked(answer, trajectory, task, context))
        return at_once(judged, lambda verdict: self._paid(verdict, components))

    def _paid(
        self, judged: Judged, components: Mapping[str, float], *, long: bool = False
    ) -> Outcome:
        """The outcome of a verdict.

        ``long``: an overlong answer, which keeps its bonus in the original.
        """
        if not isinstance(judged, Scored):
            known = {"calls": components["calls"], "format": components["format"]}
            return replace(judged, components=known)
        right = judged.value >= self._settings.right_from
        accuracy = 0.0 if long else judged.value
        value = accuracy + right * self._settings.per_call * components["calls"]
        return Scored(
            value,
            {**components, "accuracy": accuracy, "right": float(right)},
            judged.flags,
            reason=judged.reason,
        )

    def _original(
        self, trajectory: Trajectory, task: Task, context: ScoreContext
    ) -> Outcome | Awaitable[Outcome]:
        published = self._settings.published
        source = original.BENCHMARKS.get(task.source, task.source)
        response = context.transcript if context.transcript is not None else "".join(context.texts)
        components = {
            "accuracy": 0.0,
            "calls": original_calls(trajectory, context),
            "right": 0.0,
            "format": 0.0,
        }
        if source in original.BROKEN:
            return Scored(0.0, components, ("raised", "NameError"))
        if self._verifiers.kind(source) == "mra":
            return self._first_numbers(response, task, components)
        answer = original.verified(response, gate=published == "multi_task_verifier")
        if answer is None:
            return Scored(0.0, components, ("unparsable",))
        components["format"] = 1.0
        if published == "multi_task_verifier" and source not in original.EXAMPLES:
            return Scored(0.0, components, ("raised", "UnboundLocalError"))
        asked = Asked(answer, trajectory, task, replace(context, texts=[answered(answer)]))
        if published == "general_verifier":
            return self._never_failing(asked, components)
        return at_once(
            self._verifiers.asked(asked),
            lambda verdict: self._paid(verdict, components, long=len(answer) >= LONGEST),
        )

    def _first_numbers(self, response: str, task: Task, components: Mapping[str, float]) -> Outcome:
        """The original's mean relative accuracy of the first numbers."""
        said = original.first_number(response)
        true = original.first_number(task.ground_truth)
        if said is None and true == 0:
            # The original does not calculate with a truth of 0.
            return Scored(0.0, components)
        if said is None or true is None:
            return Scored(0.0, components, ("raised", "TypeError"))
        return self._paid(Scored(mean_relative_accuracy(true, said)), {**components, "format": 1.0})

    async def _never_failing(self, asked: Asked, components: Mapping[str, float]) -> Outcome:
        """The outcome of the general verifier: an answer is wrong when its judge fails."""
        try:
            verdict = self._verifiers.asked(asked)
            judged = await verdict if isinstance(verdict, Awaitable) else verdict
        except Exception as error:
            return Scored(0.0, components, ("judge_failed", type(error).__name__))
        if not isinstance(judged, Scored):
            return Scored(0.0, components, ("judge_failed",))
        return self._paid(judged, components, long=len(asked.answer) >= LONGEST)


def calls(trajectory: Trajectory, context: ScoreContext) -> float:
    """Turns whose code ran without an error."""
    turns = trajectory.sampled_turns
    if not turns:
        return float(trajectory.env_result or 0)
    return float(sum(turn.executed is True for turn in turns))


def original_calls(trajectory: Trajectory, context: ScoreContext) -> float:
    """Turns whose code was run at all."""
    turns = trajectory.sampled_turns
    if len(turns) != len(context.texts):
        return float(trajectory.env_result or 0)
    pairs = zip(turns, context.texts, strict=True)
    return sum(original.step_reward(text, turn.executed is not None, 1.0) for turn, text in pairs)
